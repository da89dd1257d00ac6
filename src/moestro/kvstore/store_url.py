"""The text of --kv-store, taken apart. No message here shows what may be a password."""

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from moestro.errors import ConfigError, shown, without_password

SCHEMES = ("lmdb", "redis", "mooncake")
FORMS = "lmdb://PATH, redis://HOST:PORT/DB or mooncake://MASTER:PORT"
_NO_PLACE = "host and port are not written as such; a port is a number up to 65535"


def split_url(url: str) -> SplitResult:
    """The parts of a store's URL with a known scheme. Raises ConfigError."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in SCHEMES or not rest:
        raise ConfigError(f"kv_store is {_shown(url)}, but must be none, {FORMS}.")
    reason = None if scheme == "lmdb" else _misplaced(scheme, rest)
    try:
        parts = urlsplit(url)
        if scheme != "lmdb":
            (parts.hostname or "").encode("idna")
            if parts.port == 0:  # parsed when asked for
                reason = reason or "port 0 is nobody's"
    except ValueError:  # its text may quote a part of the password
        what = "a folder's [ is written %5B" if scheme == "lmdb" else _NO_PLACE
        reason = reason or what
    if reason is not None:
        raise ConfigError(f"kv_store is {_shown(url)}, no URL: {reason}. Use {FORMS}.")
    return parts


def _misplaced(scheme: str, rest: str) -> str | None:
    """What is wrong before a host's end, if anything."""
    if any(char.isspace() or not char.isprintable() for char in rest):
        return "it has a space or a control character in it"
    if scheme == "mooncake":  # its options may be URLs
        rest = rest.partition("?")[0]
    place = min((i for i in map(rest.find, "/?#") if i >= 0), default=len(rest))
    if rest.rfind("@") > place:
        return "in a password / is written %2F, ? %3F and # %23"
    return None


def _shown(url: str) -> str:
    return shown(without_password(url))


def lmdb_folder(parts: SplitResult) -> Path:
    """lmdb:///absolute/folder, lmdb://relative/folder, lmdb://~/folder. Raises ConfigError."""
    url = shown(parts.geturl())
    if parts.query or parts.fragment:
        raise ConfigError(
            f"kv_store is {url}: ? and # mean nothing in a path; "
            "write %3F and %23 if the folder is called so."
        )
    text = unquote(parts.netloc + parts.path)
    if "\0" in text:
        raise ConfigError(f"kv_store is {url}: no folder's name has a NUL in it.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"kv_store is {url}: {error}. Give the whole path.") from None


def database(parts: SplitResult) -> int:
    """The number behind the slash of a Redis URL. Raises ConfigError."""
    text = parts.path.strip("/") or "0"
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if parts.query or parts.fragment or not is_number:
        raise ConfigError(
            "kv_store: behind the host of a Redis URL is the number of a database and nothing "
            "more, redis://HOST:PORT/0. In a password / is written %2F, ? %3F and # %23."
        )
    return int(text)
