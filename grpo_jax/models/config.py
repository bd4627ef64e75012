"""The shape of a Llama: plain numbers, no framework."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent RoPE scaling (Llama 3 report, section 3.4 and its code)."""

    factor: float  # 8 for 3.1, 32 for 3.2
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int  # positions


@dataclass(frozen=True)
class LlamaConfig:
    """Covers Llama 2, 3, 3.1, 3.2 and SmolLM2. Sizes are counts; `rope_theta` is the RoPE base."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads "
                f"({self.num_kv_heads}): every key head must serve as many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd: RoPE turns pairs of channels")

    @property
    def queries_per_kv(self) -> int:
        """R, the query heads that share one key head (grouped-query attention)."""
        return self.num_heads // self.num_kv_heads
