"""`moestro kv explain`: what a prompt would find in a cache, and why not more."""

import argparse
import json
from pathlib import Path
from typing import Any

from moestro.cli.console import add_common_flags, aligned, print_json, start_logging, write_text
from moestro.errors import ConfigError, RequestError, shown

HELP = "what a prompt would find, and why not more"
DESCRIPTION = (
    "Asks a running server (http://HOST:PORT) what a prompt would find in its device, host "
    "and store tiers, and why not more; or looks into a store which namespaces hold how much of "
    "the prompt. Nothing is computed, loaded or evicted."
)
TIMEOUT_S = 30.0
_AT_ONCE = 1024

_REASONS = {
    None: "every whole page of it is cached",
    "no_prefix": "no cached prompt begins like it",
    "differs": "a cached prompt begins like it up to token {first_difference:,}",
    "evicted": "the rest was cached and had to make room",
    "other_namespace": "it is cached for another cache_salt, or under another model or page size",
    "recomputed": "loading it would take longer than computing it",
    "load_failed": "a tier did not give it",
    "not_asked": "such a request reads nothing from the cache",
    "caching_off": "there is no prefix cache",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro kv explain`."""
    parser.add_argument(
        "where", metavar="WHERE", help="http://HOST:PORT of a server, or a store's URL"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with the prompt")
    prompt.add_argument(
        "--messages", metavar="FILE", help="a JSON file with a list of chat messages"
    )
    parser.add_argument("--cache-salt", metavar="TEXT", default="", help="the tenant's salt")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default="tiny-hy3",
        help="of a store: whose tokenizer and template read the prompt (default: tiny-hy3)",
    )
    parser.add_argument(
        "--page-size", metavar="N", default="64", help="of a store: tokens a page (default: 64)"
    )
    add_common_flags(parser, json_help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    start_logging(args)
    prompt = _prompt(args)
    if args.where.startswith(("http://", "https://")):
        answer = _ask_server(args.where, {**prompt, "cache_salt": args.cache_salt})
        text = _of_server(answer)
    else:
        answer = _look_into_store(args, prompt)
        text = _of_store(answer)
    if args.json:
        print_json(answer)
    else:
        write_text("".join(f"{line}\n" for line in text))
    return 0


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    """The prompt as the server's route takes it. Raises ConfigError."""
    if args.prompt is not None:
        return {"prompt": args.prompt}
    path = Path(args.prompt_file or args.messages)
    try:
        text = path.read_text(encoding="utf-8")
        if args.messages is None:
            return {"prompt": text}
        messages = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(f"{path} must hold a JSON list of messages.")
    return {"messages": messages}


def _ask_server(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of POST /v1/kv/explain. Raises ConfigError and RequestError."""
    import urllib.error
    import urllib.request

    base = url.rstrip("/").removesuffix("/v1")
    request = urllib.request.Request(
        f"{base}/v1/kv/explain",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise RequestError(_told_by(error.read(), f"{error.code} {error.reason}")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{base} does not answer as a Moestro server does: {reason}.") from None
    if not isinstance(answer, dict) or "cached_tokens" not in answer:
        raise ConfigError(f"{base} does not answer as a Moestro server does.")
    return answer


def _told_by(body: bytes, otherwise: str) -> str:
    """The message of an error's envelope."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {otherwise}."


def _of_server(answer: dict[str, Any]) -> list[str]:
    tiers = answer["cached_tokens"]
    rows = [("prompt", f"{answer['prompt_tokens']:,} tokens")]
    rows += [(tier, f"{num_tokens:,} tokens cached") for tier, num_tokens in tiers.items()]
    reason = _REASONS.get(answer["miss_reason"], str(answer["miss_reason"]))
    return [*aligned(rows), reason.format(**answer)]


def _look_into_store(args: argparse.Namespace, prompt: dict[str, Any]) -> dict[str, Any]:
    """How many leading pages of the prompt each namespace holds. Raises ConfigError."""
    from moestro.kvcache.identity import pack_tokens, page_hashes, root_hash
    from moestro.kvstore.backend import Deadline
    from moestro.kvstore.opening import open_existing

    page_size = _page_size(args.page_size)
    token_ids = _tokens(args.model, prompt)
    hashes = page_hashes(root_hash(b"", args.cache_salt), pack_tokens(token_ids), page_size)
    # the page of the last token is computed whatever is cached
    hashes = hashes[: (len(token_ids) - 1) // page_size]
    store = open_existing(args.where, TIMEOUT_S)
    try:
        rows = []
        for namespace in store.namespaces():
            num_found = 0
            for begin in range(0, len(hashes), _AT_ONCE):
                keys = [namespace.digest + h for h in hashes[begin : begin + _AT_ONCE]]
                there = store.exists_many(keys, Deadline(TIMEOUT_S))
                num_found += there.index(False) if False in there else len(there)
                if False in there:
                    break
            rows.append(
                {
                    "namespace": namespace.digest.hex(),
                    "num_pages": num_found,
                    "cached_tokens": num_found * page_size,
                }
            )
    finally:
        store.close()
    rows.sort(key=lambda row: (-int(str(row["num_pages"])), str(row["namespace"])))
    return {
        "prompt_tokens": len(token_ids),
        "num_whole_pages": len(hashes),
        "page_size": page_size,
        "namespaces": rows,
    }


def _page_size(text: str) -> int:
    """Raises ConfigError."""
    from moestro.config.kinds import Integer

    kind = Integer(1, 2**12, power_of_two=True)
    try:
        parsed = kind.parse(text)
    except (ValueError, TypeError):
        parsed = None
    if parsed is None:
        raise ConfigError(f"--page-size is {shown(text)}, but must be {kind.expects}.")
    return parsed


def _tokens(model: str, prompt: dict[str, Any]) -> list[int]:
    """The prompt's token ids, as the server would read them. Raises CheckpointError."""
    from moestro.chat.templates import ChatTemplate
    from moestro.engine.tokenizer import Tokenizer
    from moestro.weights.source import resolve_model

    folder = resolve_model(model, with_weights=False)
    template = ChatTemplate.load(folder, None)
    tokenizer = Tokenizer.load(folder, template)
    if "prompt" in prompt:
        return tokenizer.encode(prompt["prompt"])
    text = template.render(prompt["messages"], None, False)
    return tokenizer.encode(text, add_special_tokens=False)


def _of_store(answer: dict[str, Any]) -> list[str]:
    num_pages, page_size = answer["num_whole_pages"], answer["page_size"]
    lines = [
        f"{answer['prompt_tokens']:,} tokens: {num_pages:,} pages of {page_size} can be cached"
    ]
    if not answer["namespaces"]:
        return [*lines, "the store is empty"]
    rows = [
        (row["namespace"], f"{row['num_pages']:,} pages, {row['cached_tokens']:,} tokens")
        for row in answer["namespaces"]
    ]
    lines += aligned(rows)
    best = answer["namespaces"][0]["num_pages"]
    if best < num_pages:
        first = best * page_size
        lines.append(
            f"page {best:,} (tokens {first:,} to {first + page_size - 1:,}) is in no namespace "
            "behind its prefix: it differs, was evicted, or was never stored"
        )
    return lines
