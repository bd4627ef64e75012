"""The shape of a Llama or one of its kin: plain numbers, no framework."""

from dataclasses import dataclass

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent RoPE scaling (Llama 3 report, section 3.4 and its code)."""

    factor: float  # 8 for 3.1, 32 for 3.2
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int  # positions


@dataclass(frozen=True)
class LlamaConfig:
    """Covers Llama 2, 3, 3.1, 3.2, SmolLM2, Qwen2, 2.5 and 3 (dense, full attention).

    Sizes are counts; `rope_theta` is the RoPE base. `family` says what the model is called in a
    config.json; what it computes is decided by the other fields alone.
    """

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
    qkv_bias: bool = False  # on queries, keys and values (Qwen2 and 2.5)
    qk_norm: bool = False  # RMSNorm of each query and key over its head_dim, before RoPE (Qwen3)
    family: str = "llama"  # llama, qwen2 or qwen3

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads "
                f"({self.num_kv_heads}): every key head must serve as many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd: RoPE turns pairs of channels")
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r}: one of {', '.join(FAMILIES)}")

    @property
    def queries_per_kv(self) -> int:
        """R, the query heads that share one key head (grouped-query attention)."""
        return self.num_heads // self.num_kv_heads
