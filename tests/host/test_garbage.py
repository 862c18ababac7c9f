"""Start-ups leave nothing for later collections to walk, and nothing for a first request to wait for."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from support.models.tiny_llama import write_config

from headrace.config import EngineArgs
from headrace.startup.text import load_text

SETTLED = """
import gc, sys
from headrace.host.garbage import freeze_gc
kept = [[i] for i in range(1000)]
freeze_gc(young=5000)
print(gc.get_freeze_count() > 1000, any(item is kept[5] for item in gc.get_objects()), gc.get_threshold()[0])
"""


def test_settle_leaves_nothing_to_walk() -> None:
    """The test runs in another process: settling is for good."""
    frozen = gc.get_freeze_count()
    done = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False", "5000"]
    assert gc.get_freeze_count() <= frozen  # Objects that were frozen may be freed.


MEANWHILE = """
import gc, weakref
from headrace.host.garbage import frozen_meanwhile
class Cycle:
    def __init__(self): self.me = self
kept = [[i] for i in range(20000)]
old = weakref.ref(Cycle())
with frozen_meanwhile():
    new = weakref.ref(Cycle())
    with frozen_meanwhile():
        gc.collect()
    gc.collect()
    print(old() is not None, new() is None)
gc.collect()
print(old() is None)
gc.freeze()
with frozen_meanwhile():
    pass
print(gc.get_freeze_count() > 20000)
"""


def test_collections_meanwhile_look_at_new_objects_alone() -> None:
    """The test runs in another process: this one may have frozen objects. What an application froze stays frozen."""
    done = subprocess.run([sys.executable, "-c", MEANWHILE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"] * 4


def test_a_prepared_frontend_has_its_tables(tmp_path: Path) -> None:
    args = EngineArgs(model=str(write_config(tmp_path)), load_format="dummy")
    for prepared in (True, False):
        tokenizer = load_text(args, prepared=prepared).tokenizer
        assert tokenizer is not None
        tables = {"visible", "visible_index"}
        assert (tables <= vars(tokenizer.token_bytes).keys()) == prepared
