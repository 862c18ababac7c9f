"""Prints the KV bytes of a request in headrace and in vLLM, as a table.

    python benchmarks/kv_bytes.py MODEL... --output kv.json
    python benchmarks/kv_bytes.py MODEL... --measured results.json --output kv.json

A model is a folder with a config.json; no weights and no GPU are needed. headrace's numbers come from running its
block manager. vLLM's are predicted from the rules of its version 0.26, and marked so, unless a raw file of
``compare_vllm.py``, given as --measured, has vLLM's own numbers.

Three numbers per length: the bytes of the tokens that can still be attended to, and of the blocks that hold them in each
engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headrace.config import CacheConfig, EngineArgs  # noqa: E402
from headrace.kv import NULL_BLOCK, CacheIdentity, KVCacheManager  # noqa: E402
from headrace.model_spec import Arena, AttentionSpec, block_sizes, cache_groups, layer_kv  # noqa: E402
from headrace.models.implementation import choose  # noqa: E402
from headrace.sources.files import find_model  # noqa: E402

Json = dict[str, Any]
DTYPE = "bfloat16"
BLOCK = 16
"""Tokens of a block: headrace's default on a GPU, and vLLM's for layers that see everything."""
LENGTHS = (1024, 8192, 32768)
CHUNK = 8192
"""Tokens of a prompt that a step computes."""
PREDICTED, MEASURED = "predicted", "measured"


@dataclasses.dataclass(frozen=True)
class Layer:
    """KV that a layer keeps of a token, and for how long."""

    window: int | None
    nbytes: int


def layers_of(specs: Sequence[AttentionSpec]) -> list[Layer]:
    return [Layer(spec.window, layer_kv(spec, DTYPE).bytes_per_token) for spec in specs if spec.kv_source is None]


def needed(layers: Sequence[Layer], length: int) -> int:
    """Bytes of the tokens that the next one sees, if nothing were kept in blocks."""
    return sum(layer.nbytes * min(length, layer.window - 1 if layer.window else length) for layer in layers)


# ------------------------------------------------------------------ headrace


def held_by_us(specs: Sequence[AttentionSpec], length: int) -> int:
    """Bytes of the blocks that a request of ``length`` computed tokens holds, by the engine's own manager."""
    groups = cache_groups(specs, DTYPE)
    blocks = -(-length // BLOCK) + 1
    nbytes = Arena.holding(block_sizes(groups, BLOCK), [blocks] * len(groups)).nbytes
    config = CacheConfig(block_size=BLOCK, groups=groups, nbytes=nbytes, enable_prefix_caching=False, dtype=DTYPE)
    manager = KVCacheManager(config)
    sequence = manager.open(0, [0] * length, CacheIdentity())
    manager.attach(sequence, manager.no_hit())
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        if manager.allocate(sequence, end) is None:
            raise RuntimeError(f"a cache for {length} tokens did not hold them")
        manager.advance(sequence, end)
    held = [sum(block != NULL_BLOCK for block in table) for table in sequence.tables]
    return sum(map(int.__mul__, held, config.arena.block_bytes))


# ------------------------------------------------------------------ vLLM


@dataclasses.dataclass(frozen=True)
class PeerGroup:
    """Layers of vLLM that share a block table."""

    layers: int
    window: int | None
    block_size: int
    page_bytes: int
    """Bytes of a block in one layer."""

    def pages(self, length: int) -> int:
        """Blocks in its table that are not given back yet."""
        passed = 0 if self.window is None else max(0, length - self.window + 1) // self.block_size
        return -(-length // self.block_size) - passed


@dataclasses.dataclass(frozen=True)
class PeerCache:
    """vLLM's cache: groups whose blocks are all of one size, since one pool gives them out.

    A block takes a page in each of as many tensors as the largest group has layers: a smaller group leaves some unused.
    """

    groups: tuple[PeerGroup, ...]
    one_table: bool
    """All layers are in one group and have tensors of their own sizes; each is an entry of ``groups``."""

    @property
    def slots(self) -> int:
        return max(group.layers for group in self.groups)

    def held(self, length: int) -> int:
        if self.one_table:
            return sum(group.pages(length) * group.page_bytes * group.layers for group in self.groups)
        return sum(group.pages(length) * group.page_bytes for group in self.groups) * self.slots

    def describe(self) -> str:
        told = []
        for group, count in _counted(self.groups):
            window = "full" if group.window is None else f"window {group.window}"
            slots = group.layers if self.one_table else self.slots
            unused = f" and {slots - group.layers} unused" if slots > group.layers else ""
            times = f"{count} of " if count > 1 else ""
            told.append(f"{times}({window}: {group.layers} layers{unused}, {group.page_bytes:,} bytes for {group.block_size})")
        return ", ".join(told)


def _counted(items: Sequence[Any]) -> list[tuple[Any, int]]:
    """Equal ones, and how many: in the order of the first of each."""
    counts: dict[Any, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return list(counts.items())


def predicted(layers: Sequence[Layer]) -> PeerCache:
    """Predicts the cache that vLLM 0.26 makes of such layers by the rules of its ``kv_cache_utils``, with a backend that has
    the block as its cache's outermost dimension, as FlashAttention has.

    Pages of all layers are to be equally large: where a page is smaller, more tokens go into it if that comes out even,
    else it is padded. Layers of a kind are then cut into groups of as many layers as the rarest kind has (or the most common
    one, if that is less than half as many again), the last of which may be smaller.
    """
    kinds = dict(_counted(layers))
    if len({kind.window for kind in kinds}) == 1:
        # One block table for all; a tensor a layer, of its own size.
        groups = tuple(PeerGroup(count, kind.window, BLOCK, BLOCK * kind.nbytes) for kind, count in kinds.items())
        return PeerCache(groups, one_table=len(groups) > 1)
    page = max(BLOCK * kind.nbytes for kind in kinds)
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * fewest else fewest
    cut = []
    for kind, count in kinds.items():
        tokens = page // kind.nbytes if page % (BLOCK * kind.nbytes) == 0 else BLOCK
        parts = math.ceil(count / size)
        for part in range(parts):
            cut.append(PeerGroup(len(range(part, count, parts)), kind.window, tokens, page))
    return PeerCache(tuple(cut), one_table=False)


def measured(facts: Json) -> PeerCache:
    """Reads the cache that ``vllm_peer.py`` printed."""
    groups = [
        PeerGroup(group["layers"], group["window"], group["block_size"], group["page_bytes"]) for group in facts["groups"]
    ]
    return PeerCache(tuple(groups), facts["one_table"])


# ------------------------------------------------------------------ the report


def report(folder: Path, lengths: Sequence[int], facts: Json | None, ours: Json | None) -> Json:
    """Reports on one model.

    Args:
        facts: what vLLM said of its cache.
        ours: what our engine said of itself when it ran.
    """
    args = EngineArgs(model=str(folder), load_format="dummy", model_impl="native")
    specs = choose(args, find_model(args)).spec.layers
    layers = layers_of(specs)
    guess = predicted(layers)
    peer = guess if facts is None else measured(facts)
    rows = []
    for length in lengths:
        held, theirs = held_by_us(specs, length), peer.held(length)
        row = {"tokens": length, "needed": needed(layers, length), "headrace": held, "vllm": theirs}
        rows.append(row | {"ratio": theirs / held})
    return {
        "model": folder.name,
        "layers": [dataclasses.asdict(layer) for layer in layers],
        "vllm_is": PREDICTED if facts is None else MEASURED,
        "vllm_groups": [dataclasses.asdict(group) for group in peer.groups],
        "vllm_layout": peer.describe(),
        "prediction_held": None if facts is None else _same(guess, peer),
        "capacity": {"headrace": _our_capacity(ours), "vllm": _their_capacity(facts)},
        "rows": rows,
    }


def _same(one: PeerCache, other: PeerCache) -> bool:
    def key(cache: PeerCache) -> list[tuple[object, ...]]:
        entries = [(group.window or 0, group.block_size, group.page_bytes, group.layers) for group in cache.groups]
        if not cache.one_table:
            return sorted(entries)
        return sorted(entry[:3] for group, entry in zip(cache.groups, entries, strict=True) for _ in range(group.layers))

    return key(one) == key(other)


def _our_capacity(info: Json | None) -> int | None:
    return None if info is None else info["memory"]["KV cache"]


def _their_capacity(facts: Json | None) -> int | None:
    return None if facts is None else sum(facts["tensor_bytes"])


def markdown(reports: Sequence[Json]) -> str:
    lines = ["| model | tokens | seen, MiB | headrace, MiB | vLLM, MiB | vLLM / headrace | vLLM's is |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for each in reports:
        for row in each["rows"]:
            cells = [_mib(row["needed"]), _mib(row["headrace"]), _mib(row["vllm"])]
            lines.append(
                f"| {each['model']} | {row['tokens']:,} | {' | '.join(cells)} | {row['ratio']:.3f} | {each['vllm_is']} |"
            )
    lines.append("")
    for each in reports:
        kinds = _counted([Layer(**layer) for layer in each["layers"]])
        told = ", ".join(
            f"{count} of {layer.nbytes:,} ({'full' if layer.window is None else f'window {layer.window}'})"
            for layer, count in kinds
        )
        lines.append(
            f"{each['model']}: bytes a token and layer {told}. vLLM's groups, {each['vllm_is']}: {each['vllm_layout']}."
        )
        if each["prediction_held"] is False:
            lines.append(f"What was predicted of vLLM's groups for {each['model']} is not what was measured.")
        lines += _capacities(each)
    return "\n".join(lines) + "\n"


def _capacities(each: Json) -> list[str]:
    """Describes how many requests of each length the caches hold that the engines made on the GPU."""
    lines = []
    for engine, capacity in each["capacity"].items():
        if capacity is None:
            continue
        fit = ", ".join(f"{capacity // row[engine]:,} of {row['tokens']:,} tokens" for row in each["rows"])
        lines.append(f"{engine}'s cache of {capacity / 2**30:.2f} GiB held at once, {each['model']}: {fit}.")
    return lines


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f}"


def told(files: Sequence[Path]) -> tuple[dict[str, Json], dict[str, Json]]:
    """Returns the latest reports of vLLM and of our engine on their caches, by model."""
    theirs: dict[str, Json] = {}
    ours: dict[str, Json] = {}
    read = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for entry in sorted(itertools.chain(*(data.get("kv", []) for data in read)), key=lambda entry: entry["at"]):
        if entry["engine"] == "vllm" and "groups" in entry["kv"]:
            theirs[entry["model"]] = entry["kv"]
    for entry in sorted(itertools.chain(*(data["starts"] for data in read)), key=lambda entry: entry["at"]):
        if entry["engine"] == "headrace":
            ours[entry["model"]] = entry["facts"]["engine"]
    return theirs, ours


def lengths(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"lengths are whole numbers of tokens above 0, not {text}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders with a config.json")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], metavar="FILE", help="raw files of compare_vllm.py")
    parser.add_argument("--lengths", type=lengths, default=list(LENGTHS), help="of requests, in tokens, with commas between")
    parser.add_argument("--output", type=Path, help="JSON file; the table goes beside it")
    options = parser.parse_args()
    theirs, ours = told(options.measured)
    made = [report(folder, options.lengths, theirs.get(folder.name), ours.get(folder.name)) for folder in options.models]
    text = markdown(made)
    if options.output is not None:
        options.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
