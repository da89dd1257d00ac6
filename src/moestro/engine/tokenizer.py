"""Text to token ids and back. The only module that imports the `tokenizers` library.

Byte-level BPE only (Hy3, Qwen3): there every token stands for a fixed run of bytes, so decoding is
the concatenation of those runs and can be done incrementally, to the byte.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from moestro.chat.templates import ChatTemplate
from moestro.core.tokenizer_config import (
    NAMED_TOKENS,
    added_tokens,
    listed_tokens,
    read_tokenizer_config,
    token_text,
)
from moestro.errors import CheckpointError, RequestError, UnsupportedError, shown

logger = logging.getLogger(__name__)

LONG_TEXT_CHARS = 2048
"""Longer texts take milliseconds; they are encoded with Python's lock released."""
_MAX_TOKEN_ID = 2**24
_MAX_NFC_SHRINK = 4  # code points that canonical composition can fold into one


class Tokenizer:
    """A checkpoint's tokenizer.

    init_kwargs is tokenizer_config.json as it is (with special_tokens_map.json merged in below
    it); token_suffix is Hy3's suffix of structural tokens, "" elsewhere. Special tokens vanish
    under skip_special_tokens; added tokens that are not special (think and tool markers) stay.
    chat_template is for apply_chat_template.
    """

    def __init__(
        self,
        backend: Backend,
        init_kwargs: Mapping[str, Any],
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self.init_kwargs = dict(init_kwargs)
        self.chat_template = chat_template
        self.token_suffix = str(init_kwargs.get("token_suffix") or "")
        self.bos_token = token_text(init_kwargs.get("bos_token"))
        self.eos_token = token_text(init_kwargs.get("eos_token"))
        self.pad_token = token_text(init_kwargs.get("pad_token"))
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self.pad_token_id = self._id_of(self.pad_token)
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}
        self.max_chars_per_token = _max_chars_per_token(backend, added.values())

    @classmethod
    def load(cls, folder: Path, chat_template: ChatTemplate | None = None) -> "Tokenizer":
        """Read tokenizer.json and its companions.

        Raises CheckpointError: no tokenizer.json, unreadable files, or an eos that is not one id;
        UnsupportedError: a decoder other than ByteLevel.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist: the tokenizer can't be loaded. Point `tokenizer` at a "
                "folder that has tokenizer.json, or set skip_tokenizer_init to work with token ids."
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
        _check_ids(backend, path)
        config = read_tokenizer_config(folder)
        backend.no_truncation()
        backend.no_padding()
        _require_byte_level_bpe(backend, path)
        _add_missing_tokens(backend, config, folder)
        _mark_special(backend, config)
        _check_eos(backend, config, folder)
        _obey_bos_eos_flags(backend, config)
        return cls(backend, config, chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a text, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._special_ids)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text to id of the added tokens, special or not."""
        return dict(self._added)

    def get_vocab(self) -> dict[str, int]:
        """Every piece, in its stored spelling, and its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises RequestError: a lone surrogate, or the library refuses."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The prompt is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
                f"at position {error.start}. Remove it or replace it with U+FFFD.",
                "prompt",
            ) from None
        try:
            if len(text) > LONG_TEXT_CHARS:
                encoded = self._backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )[0]
            else:
                encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        except Exception as error:  # the library raises plain Exception
            raise RequestError(
                f"The tokenizer can't encode the prompt: {error}", "prompt"
            ) from error

    def decode(
        self,
        token_ids: int | Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of the ids; bytes that are no valid UTF-8 become U+FFFD, unknown ids nothing.

        spaces_between_special_tokens changes nothing for a byte-level vocabulary, where spaces
        are part of the tokens.
        """
        del spaces_between_special_tokens
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        parts = (
            self.token_bytes(i) for i in ids if not (skip_special_tokens and self.is_special(i))
        )
        return b"".join(parts).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens drops this id."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
            known = self._bytes[token_id] = b"" if piece is None else _piece_bytes(piece)
        return known

    def token_to_piece(self, token_id: int) -> str:
        """One token as text, special tokens spelt out: `decoded_token` of a Logprob."""
        known = self._pieces.get(token_id)
        if known is None:
            known = self.token_bytes(token_id).decode(errors="replace")
            self._pieces[token_id] = known
        return known

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """Render the checkpoint's chat template, to ids or to text. RequestError without one."""
        if self.chat_template is None:
            raise RequestError("This tokenizer has no chat template; see --chat-template.")
        text = self.chat_template.render(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in table.values())
    table.update({chr(256 + n): b for n, b in enumerate(rest)})
    return table


_BYTE_OF = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """A piece as bytes; one with a character outside the alphabet (added tokens) is plain text."""
    try:
        return bytes(_BYTE_OF[c] for c in piece)
    except KeyError:
        return piece.encode(errors="replace")


def _check_ids(backend: Backend, path: Path) -> None:
    """First of all: the library walks through all ids up to the highest, with holes or not."""
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if highest > _MAX_TOKEN_ID:
        raise CheckpointError(
            f"{path}: the token id {highest} is beyond {_MAX_TOKEN_ID}, which no vocabulary "
            "reaches: corrupt."
        )


def _require_byte_level_bpe(backend: Backend, path: Path) -> None:
    state = json.loads(backend.to_str(pretty=False))
    model = state["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(
            f"{path}: the model is {model['type']}, only BPE is supported (byte-level BPE, as Hy3 "
            "and Qwen3 use)."
        )
    lost = sum(letter not in model["vocab"] for letter in _BYTE_OF)
    if lost:
        logger.warning(
            "%s lacks %d of the 256 byte letters: text with these bytes loses them", path, lost
        )
    kinds = _component_kinds(state.get("decoder"), "decoders")
    if kinds != ["ByteLevel"]:
        raise UnsupportedError(
            f"{path}: the decoder is {' + '.join(kinds) or 'missing'}, only ByteLevel is supported "
            "(byte-level BPE, as Hy3 and Qwen3 use)."
        )


def _component_kinds(component: dict[str, Any] | None, inner: str) -> list[str]:
    """Types of a tokenizer component, sequences taken apart."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [kind for part in component[inner] for kind in _component_kinds(part, inner)]
    return [component["type"]]


def _add_missing_tokens(backend: Backend, config: dict[str, Any], folder: Path) -> None:
    """Add what only tokenizer_config.json's added_tokens_decoder knows, under its own ids."""
    for wanted, entry in added_tokens(config).items():
        text = token_text(entry)
        if text is None:
            continue
        known = backend.get_added_tokens_decoder().get(wanted)
        promoted = known is not None and entry.get("special", False) and not known.special
        if backend.token_to_id(text) is None or promoted:
            flags = ("single_word", "lstrip", "rstrip", "normalized")
            token = AddedToken(text, **{f: bool(entry.get(f, False)) for f in flags})
            add = backend.add_special_tokens if entry.get("special") else backend.add_tokens
            add([token])
        if backend.token_to_id(text) != wanted:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives {shown(text)} the id {wanted}, "
                f"tokenizer.json gives it {backend.token_to_id(text)}. The two files do not "
                "belong together."
            )


def _mark_special(backend: Backend, config: dict[str, Any]) -> None:
    """Named special tokens are special even where tokenizer.json lists them as ordinary ones."""
    named = [config.get(name) for name in NAMED_TOKENS]
    names = [token_text(value) for value in (*named, *listed_tokens(config))]
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for name in names:
        if name and name not in special and backend.token_to_id(name) is not None:
            backend.add_special_tokens([AddedToken(name, normalized=False)])


def _check_eos(backend: Backend, config: dict[str, Any], folder: Path) -> None:
    eos = token_text(config.get("eos_token"))
    if eos is None or backend.token_to_id(eos) is not None:
        return
    ids = backend.encode(eos, add_special_tokens=False).ids
    raise CheckpointError(
        f"{folder}: eos_token {shown(eos)} is not one token but {len(ids)} ({ids}): generation "
        "could never end on it. Make it an added token in tokenizer.json, or correct eos_token in "
        "tokenizer_config.json."
    )


def _obey_bos_eos_flags(backend: Backend, config: dict[str, Any]) -> None:
    """add_bos_token / add_eos_token, where the config has them, overrule tokenizer.json."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos, eos = token_text(config.get("bos_token")), token_text(config.get("eos_token"))
    bos = bos if config.get("add_bos_token") and bos else None
    eos = eos if config.get("add_eos_token") and eos else None
    used = [
        (t, backend.token_to_id(t)) for t in (bos, eos) if t and backend.token_to_id(t) is not None
    ]
    known = {text for text, _ in used}
    single = [*([bos] if bos in known else []), "$A", *([eos] if eos in known else [])]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=used)


def _max_chars_per_token(backend: Backend, added: Iterable[AddedToken]) -> int | None:
    """The most characters of text one token can stand for; None when there is no bound."""
    state = json.loads(backend.to_str(pretty=False))
    vocab = state["model"].get("vocab", {})
    if any(t.lstrip or t.rstrip for t in added) or not all(c in vocab for c in _BYTE_OF):
        return None  # swallowed whitespace, or bytes that vanish
    normalizers = _component_kinds(state.get("normalizer"), "normalizers")
    if any(kind != "NFC" for kind in normalizers):
        return None
    if _may_drop_text(state.get("pre_tokenizer")):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return longest * (_MAX_NFC_SHRINK if normalizers else 1)


def _may_drop_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether some text may vanish while it is split, so that no token stands for it."""
    if pre_tokenizer is None or pre_tokenizer["type"] in ("ByteLevel", "Digits"):
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_may_drop_text(part) for part in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer["type"] != "Split" or pre_tokenizer["behavior"] == "Removed")
