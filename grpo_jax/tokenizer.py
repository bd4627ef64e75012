"""Text to token ids and back. The only importer of `transformers`, inside functions only.

Three rules hold everywhere: text that a user or a data set supplies never turns into a special
token (typing `<eos>` gives five characters), a sequence starts with at most one BOS, and a
conversation has the same ids on every day: a chat template that asks for the date is told
`PINNED_DATE`.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_jax import template

# Templates that print the day they are rendered on (Llama 3.2's "Today Date: ...") would give each
# day other prompts. This is the day that Llama 3.1's template names where it is told none.
PINNED_DATE = date(2024, 7, 26)
# The call is replaced in the template's text: transformers lets no function into a template.
_ASKS_FOR_DATE = re.compile(r"""strftime_now\(\s*(?:'([^'"\\]*)'|"([^'"\\]*)")\s*\)""")

# half a code point, which some data sets hold and no tokenizer takes
_SURROGATE, _UNKNOWN = re.compile("[\ud800-\udfff]"), "\N{REPLACEMENT CHARACTER}"

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
    # what the chat template is given besides the messages, say enable_thinking=False (Qwen3)
    chat_arguments: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of `text` taken literally, with one BOS in front if asked for; nothing else is added.

        Raises ValueError if `bos` is asked of a tokenizer without one.
        """
        text = _SURROGATE.sub(_UNKNOWN, text)
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
        text. (An added token that the tokenizer doesn't call special, as Qwen3's `<think>`, may be
        written by both.) Exactly one BOS leads if the tokenizer uses one. Raises ValueError if the
        tokenizer has no chat template, or one whose date can't be pinned.
        """
        messages = [m | {"content": _SURROGATE.sub(_UNKNOWN, m["content"])} for m in messages]
        if any(self._special_pattern.search(message["content"]) for message in messages):
            ids = self._shielded_chat(messages)
        else:
            ids = self._apply_template(messages, tokenize=True)
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

    def _apply_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> Any:
        return self.backend.apply_chat_template(
            messages,
            chat_template=self._dated_template,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
            **self.chat_arguments,
        )

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
        rendered = self._apply_template(
            [
                message
                | {"content": self._special_pattern.sub(lambda m: shield[m[0]], message["content"])}
                for message in messages
            ],
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
    def _dated_template(self) -> str:
        """The chat template with the pinned date in the place of each call for today's."""
        if not self.backend.chat_template:
            raise ValueError("this tokenizer has no chat template; use a raw-text prompt style")
        template = _ASKS_FOR_DATE.sub(
            lambda call: f"'{PINNED_DATE.strftime(call[1] or call[2] or '')}'",
            self.backend.get_chat_template(),
        )
        if re.search(r"strftime_now\s*\(", template):
            raise ValueError("the chat template asks for today's date in a format of its making")
        return template

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
    return _wrap(fast, more_eos=(), adds_bos=True, chat_arguments={})


def load(folder: str | Path, chat_arguments: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer saved in a local Hugging Face folder (tokenizer.json and its config).

    EOS ids are the tokenizer's own and those of generation_config.json (Llama 3 lists several), or
    of config.json where that file names none. A tokenizer without a pad token pads with its first
    EOS id. Raw prompts start with BOS where the tokenizer puts one in front of plain text itself.

    `chat_arguments` are passed to the chat template at each use: `{"enable_thinking": False}` lets
    Qwen3 answer without thinking, `{"date_string": "01 Jan 2025"}` gives Llama 3 another date.

    No Python file of the folder is run. Raises FileNotFoundError if the folder holds no tokenizer,
    ValueError if it names no EOS, if it needs code of its own, or if the chat template doesn't know
    an argument or does harm (`template.py`).
    """
    folder = Path(folder)
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"no tokenizer_config.json in {folder}: not a tokenizer's folder")
    backend = _transformers().AutoTokenizer.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,  # said, or it would ask whoever sits there, and wait
    )
    plain = backend("a")["input_ids"]
    adds_bos = backend.bos_token_id is not None and plain[:1] == [backend.bos_token_id]
    chat_arguments = dict(chat_arguments or {})
    _check_arguments(backend.chat_template, chat_arguments)
    templates = backend.chat_template or {}
    for text in [templates] if isinstance(templates, str) else templates.values():
        template.refuse_harmful(text, chat_arguments)
    return _wrap(backend, _saved_eos(folder), adds_bos, chat_arguments)


def _wrap(
    backend: Any, more_eos: tuple[int, ...], adds_bos: bool, chat_arguments: dict[str, Any]
) -> Tokenizer:
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
        chat_arguments=chat_arguments,
    )


def _check_arguments(template: str | dict[str, str] | None, arguments: dict[str, Any]) -> None:
    """ValueError for a name that no template mentions: Jinja would silently ignore it."""
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    known = set(re.findall(r"\w+", text)) - {"messages", "add_generation_prompt", "strftime_now"}
    for name in arguments:
        if name not in known:
            raise ValueError(f"the chat template takes no argument {name!r}")


def _saved_eos(folder: Path) -> tuple[int, ...]:
    """`eos_token_id`, a number or a list, of the first file that has one (as in transformers)."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def _transformers() -> Any:
    # it would announce at each start that PyTorch is missing, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
