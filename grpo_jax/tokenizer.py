"""Text to token ids and back. The only importer of `transformers`, inside functions only.

Two rules hold everywhere: text that a user or a data set supplies never turns into a special token
(typing `<eos>` gives five characters), and a sequence starts with at most one BOS.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_CHARACTERS = "0123456789+-*/=() \n<>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?.,:"
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")

# Every role but the assistant's shares the user's tag: the vocabulary has no third one.
_CHAR_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] + eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer behind the few calls that this project makes.

    Make one with `char_tokenizer` or `load`.
    """

    backend: Any  # a transformers fast tokenizer
    eos_ids: tuple[int, ...]  # every id that ends an answer; the tokenizer's own comes first
    pad_id: int  # may equal an EOS id: masks come from positions, never from `ids != pad`
    bos_id: int | None
    adds_bos: bool  # whether raw text, without a chat template, is to start with BOS
    vocab_size: int  # largest id + 1; a model's embedding may have more rows

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of `text` taken literally, with one BOS in front if asked for; nothing else is added.

        Raises ValueError if `bos` is asked of a tokenizer without one.
        """
        ids = self.backend(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if not bos:
            return ids
        if self.bos_id is None:
            raise ValueError("this tokenizer has no BOS token")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`, by default without the special tokens; spaces are left as they are."""
        return self.backend.decode(
            [int(i) for i in ids],
            skip_special_tokens=skip_special,
            clean_up_tokenization_spaces=False,
        )

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation (`role`, `content`) up to where the assistant is to go on.

        The chat template writes the special tokens; what stands in a message's content stays
        text. Exactly one BOS leads if the tokenizer uses one. Raises ValueError if the tokenizer
        has no chat template.
        """
        if not self.backend.chat_template:
            raise ValueError("this tokenizer has no chat template; use a raw-text prompt style")
        messages = list(messages)
        if any(self._special_pattern.search(message["content"]) for message in messages):
            ids = self._shielded_chat(messages)
        else:
            ids = self.backend.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        if self.bos_id is None:
            return ids
        while ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        # a template may leave BOS to the tokenizer, which adds none while it renders a chat
        return ids if not self.adds_bos or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def stop_ids(self, strings: Iterable[str]) -> tuple[int, ...]:
        """All ids, ascending, whose own text contains any of `strings`.

        Sampling one of them ends an answer. A string that the vocabulary only spells over several
        tokens (say "Question:") has no id here; the reader of the text must look for it.
        Raises ValueError for an empty string, which would stop everywhere.
        """
        strings = tuple(strings)
        if "" in strings:
            raise ValueError("a stop string must not be empty")
        if not strings:
            return ()
        found = (i for i, piece in enumerate(self._pieces) if any(s in piece for s in strings))
        return tuple(found)

    def _shielded_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A chat whose contents spell special tokens.

        Those spellings travel through the template as unused code points; what then still looks
        special was written by the template.
        """
        contents = "".join(message["content"] for message in messages)
        unused = (chr(i) for i in range(0xF0000, 0xFFFFE) if chr(i) not in contents)
        spelled = sorted(set(self._special_pattern.findall(contents)))
        shield = dict(zip(spelled, unused, strict=False))
        unshield = str.maketrans({mark: text for text, mark in shield.items()})
        rendered = self.backend.apply_chat_template(
            [
                message
                | {"content": self._special_pattern.sub(lambda m: shield[m[0]], message["content"])}
                for message in messages
            ],
            add_generation_prompt=True,
            tokenize=False,
        )
        ids: list[int] = []
        for piece in re.split(f"({self._special_pattern.pattern})", rendered):
            if piece in self._special_ids:
                ids.append(self._special_ids[piece])
            elif piece:
                ids += self.encode(piece.translate(unshield))
        return ids

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = self.backend.added_tokens_decoder.items()
        return {str(token): i for i, token in added if token.special}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        # "(?!)" matches nothing: a vocabulary without special tokens
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _pieces(self) -> tuple[str, ...]:
        return tuple(self.decode([i]) for i in range(self.vocab_size))


def char_tokenizer() -> Tokenizer:
    """The embedded default: 83 tokens, one a character (6 special, 77 characters).

    Ids 0 to 3 are pad, bos, eos and unk. A character outside the set becomes unk. Raw prompts
    start with BOS.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # without it, decoding puts spaces between characters
    fast = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAR_TEMPLATE
    return _wrap(fast, more_eos=(), adds_bos=True)


def load(folder: str | Path) -> Tokenizer:
    """The tokenizer saved in a local Hugging Face folder (tokenizer.json and its config).

    EOS ids are the tokenizer's own and those of generation_config.json (Llama 3 lists several).
    A tokenizer without a pad token pads with its first EOS id. Raw prompts start with BOS where
    the tokenizer puts one in front of plain text by itself.

    Raises FileNotFoundError if the folder holds no tokenizer, ValueError if it names no EOS.
    """
    folder = Path(folder)
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"no tokenizer_config.json in {folder}: not a tokenizer's folder")
    backend = _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain = backend("a")["input_ids"]
    adds_bos = backend.bos_token_id is not None and plain[:1] == [backend.bos_token_id]
    return _wrap(backend, more_eos=_generation_eos(folder), adds_bos=adds_bos)


def _wrap(backend: Any, *, more_eos: tuple[int, ...], adds_bos: bool) -> Tokenizer:
    own = () if backend.eos_token_id is None else (backend.eos_token_id,)
    eos_ids = tuple(dict.fromkeys((*own, *more_eos)))
    if not eos_ids:
        raise ValueError("the tokenizer names no EOS token: sampling could never stop")
    return Tokenizer(
        backend=backend,
        eos_ids=eos_ids,
        pad_id=eos_ids[0] if backend.pad_token_id is None else backend.pad_token_id,
        bos_id=backend.bos_token_id,
        adds_bos=adds_bos,
        vocab_size=max(backend.get_vocab().values()) + 1,
    )


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, which may be missing, a number or a list."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _transformers() -> Any:
    # it would announce at each start that PyTorch is missing, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
