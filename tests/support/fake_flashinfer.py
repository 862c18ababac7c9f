"""A stand-in for FlashInfer on the CPU: the one place that says how its wrappers are called.

It promises:

- Results are those of the formula, computed by the reference of paged attention.
- An argument of another dtype, shape, device or order than FlashInfer takes fails, as does a run without its plan.
- Copies to the "device" are done as late as they may be, and fail where the host memory they come from has changed meanwhile.
- A replay reads nothing but what a captured kernel could: buffers on the device, and the plan in its integers' workspace. It
  fails where another kernel would be launched than was captured.

It does not promise:

- FlashInfer's numbers: it neither rounds nor splits sums as the kernels do;
- that FlashInfer has a kernel for a geometry, or still has these signatures: ``attention/flashinfer/test_flashinfer_gpu.py``
  runs FlashInfer itself, on a GPU;
- to find what only streams that run at the same time get wrong.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.attention import compiled, select
from headrace.attention.flashinfer import attention, replay
from headrace.kernels import pages
from headrace.kernels.attention.reference import paged_attention


class Device:
    """Copies under way, and the marks between them."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor, Callable[[], None]]] = []
        self.done = 0
        self.plans: dict[int, dict[str, Any]] = {}
        """Integers' workspace -> the plan that is there, once its copy is done."""
        self.fresh: set[int] = set()
        """Workspaces planned since they were last read by a replay."""
        self.capturing = False
        self.replaying = False
        self.read: set[int] = set()
        """Workspaces that this replay has read already."""
        self._tape: list[Any] = []
        self._at = 0
        self.built: list[tuple[Any, ...]] = []
        self.wrappers = 0
        """Made so far."""
        self.allowed = threading.Event()
        """Set where kernels may be built."""
        self.allowed.set()

    def copy(self, host: torch.Tensor, act: Callable[[], None]) -> None:
        assert host.device.type == "cpu"
        self.queue.append((host, host.clone(), act))

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """Brings the tape of what is launched within."""
        self.capturing, self._tape = True, []
        yield self._tape
        self.capturing = False

    @contextlib.contextmanager
    def replay(self, tape: list[Any]) -> Iterator[None]:
        """Launches within must be those on the tape, whatever wrapper is asked."""
        self.capturing = self.replaying = True
        self._tape, self._at = tape, 0
        self.read.clear()
        yield
        assert self._at == len(tape)
        self.capturing = self.replaying = False

    def launched(self, wrapper: Any) -> Any:
        """The wrapper whose buffers a launch reads: in a replay, the one that was captured."""
        if self.replaying:
            self._at += 1
            return self._tape[self._at - 1]
        if self.capturing:
            self._tape.append(wrapper)
        return wrapper

    def drain(self, until: int | None = None) -> None:
        until = len(self.queue) if until is None else until
        for host, was, act in self.queue[self.done : until]:
            assert torch.equal(host, was), "host memory was written before the device had read it"
            act()
        self.done = max(self.done, until)


class FakeMark:
    device: Device

    def __init__(self, place: torch.device) -> None:
        self._at = 0

    def set(self) -> None:
        self._at = len(self.device.queue)

    def wait(self) -> None:
        self.device.drain(self._at)


def indices(tensor: torch.Tensor, length: int, name: str) -> list[int]:
    assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.shape == (length,), name
    return tensor.tolist()


def rising(tensor: torch.Tensor, length: int, name: str) -> list[int]:
    found = indices(tensor, length, name)
    assert found[0] == 0 and all(a <= b for a, b in itertools.pairwise(found)), name
    return found


def module_for(device: Device) -> dict[str, Any]:
    class Base:
        def __init__(self, workspace: torch.Tensor) -> None:
            device.wrappers += 1
            assert workspace.dtype == torch.uint8 and workspace.dim() == 1
            self._integers = torch.zeros(8, dtype=torch.uint8)
            self._planned: dict[str, Any] | None = None

        def write_plan(self, host: torch.Tensor, plan: dict[str, Any]) -> None:
            """The plan is made from host memory that the wrapper owns, and of what the lengths on the host say now."""
            self._planned = plan
            where = self._integers.data_ptr()

            def act() -> None:
                device.plans[where] = plan
                device.fresh.add(where)

            device.copy(host, act)

        def read_plan(self, launched: tuple[Any, ...]) -> dict[str, Any]:
            """Returns the plan in the workspace; its launch must be the one that was captured."""
            device.drain()
            where = self._integers.data_ptr()
            plan = device.plans[where]
            assert plan["launch"] == launched, "another kernel would have been launched than was captured"
            if device.replaying and where not in device.read:
                assert where in device.fresh, "replayed without a plan of its own"
                device.fresh.remove(where)
                device.read.add(where)
            return plan

    class Paged(Base):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            qo_indptr_buf: torch.Tensor | None = None,
            paged_kv_indptr_buf: torch.Tensor | None = None,
            paged_kv_indices_buf: torch.Tensor | None = None,
            paged_kv_last_page_len_buf: torch.Tensor | None = None,
            backend: str = "auto",
        ) -> None:
            super().__init__(float_workspace_buffer)
            assert kv_layout == "NHD" and backend in ("fa2", "fa3")
            self._backend, self._graph = backend, use_cuda_graph
            self._buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
            self._most: int | None = None
            if use_cuda_graph:
                assert all(buffer is not None and buffer.dtype == torch.int32 for buffer in self._buffers)
                self._rows = len(qo_indptr_buf) - 1
                assert len(paged_kv_indptr_buf) == self._rows + 1 and len(paged_kv_last_page_len_buf) == self._rows

        def reset_workspace_buffer(self, floats: torch.Tensor, integers: torch.Tensor) -> None:
            assert integers.dtype == torch.uint8 and len(integers) >= 1 << 16
            self._integers = integers

        def plan(
            self,
            qo_indptr: torch.Tensor,
            paged_kv_indptr: torch.Tensor,
            paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            *,
            head_dim_vo: int,
            causal: bool,
            sm_scale: float,
            window_left: int,
            logits_soft_cap: float | None,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
            max_token_per_sequence: int,
        ) -> None:
            assert not device.capturing, "a plan cannot be captured"
            rows = len(qo_indptr) - 1
            queries = rising(qo_indptr, rows + 1, "qo_indptr")
            pages = rising(paged_kv_indptr, rows + 1, "paged_kv_indptr")
            last = indices(paged_kv_last_page_len, rows, "paged_kv_last_page_len")
            assert all(1 <= length <= page_size for length in last)
            assert all(a < b for a, b in itertools.pairwise(pages)), "a row without pages"
            assert max_token_per_sequence == max(b - a for a, b in itertools.pairwise(queries))
            assert causal and num_qo_heads % num_kv_heads == 0 and q_data_type == kv_data_type
            assert paged_kv_indices.dtype == torch.int32 and paged_kv_indices.dim() == 1
            self._total = queries[-1]
            if self._graph:
                self._most = self._most or self._total
                assert rows == self._rows and self._total <= self._most
                assert len(paged_kv_indices) == 0, "pages of a captured step are written by its own kernel"
                assert pages[-1] <= len(self._buffers[2])
                for buffer, host in zip(
                    (self._buffers[0], self._buffers[1], self._buffers[3]),
                    (qo_indptr, paged_kv_indptr, paged_kv_last_page_len),
                    strict=True,
                ):
                    device.copy(host, lambda buffer=buffer, host=host: buffer.copy_(host))
            else:
                assert len(paged_kv_indices) == pages[-1]
                self._buffers = [
                    each.clone() for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
                ]
                self._integers[:4] = 1
            fixed = (rows, self._most, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
            self._launch = (*fixed, sm_scale, window_left, logits_soft_cap, self._backend)
            self._dtype, self._page_size = q_data_type, page_size
            self._limits = {"scale": sm_scale, "window": None if window_left < 0 else window_left + 1}
            self._limits["soft_cap"] = logits_soft_cap
            self._heads = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo
            self.write_plan(torch.tensor(queries + pages), {"launch": self._launch, "queries": queries, "pages": pages})

        def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
            assert self._planned is not None, "run before plan"
            self = device.launched(self)
            keys, values = kv
            assert keys.stride() == values.stride() and q.dtype == keys.dtype == out.dtype == self._dtype
            assert keys.shape[1] == self._page_size
            assert (q.shape[1], *keys.shape[2:], values.shape[3]) == self._heads, "planned for other heads"
            if not device.replaying:
                assert len(q) == self._total
            plan = self.read_plan(self._launch)
            if not self._graph and not self._integers.any():
                return  # A plan without tiles.
            starts, page_start, pages, last = self._buffers
            assert starts.tolist() == plan["queries"] and page_start.tolist() == plan["pages"]
            counts = page_start.diff()
            assert int(pages[: page_start[-1]].min()) >= 0 and int(pages[: page_start[-1]].max()) < len(keys)
            table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
            for row, count in enumerate(counts.tolist()):
                table[row, :count] = pages[page_start[row] : page_start[row] + count]
            lengths = (counts - 1) * self._page_size + last
            found = paged_attention(q, keys, values, table, starts, lengths, **self._limits)
            # Tokens of no row are left as they are.
            out[: starts[-1]] = found[: starts[-1]]

    class Ragged(Base):
        def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
            super().__init__(float_workspace_buffer)
            assert kv_layout == "NHD" and backend == "fa3"

        def reset_workspace_buffer(self, floats: torch.Tensor, integers: torch.Tensor) -> None:
            assert integers.dtype == torch.uint8 and len(integers) >= 1 << 16
            self._integers = integers

        def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *heads: int, **limits: Any) -> None:
            rows = len(qo_indptr) - 1
            self._queries, self._keys = rising(qo_indptr, rows + 1, "qo"), rising(kv_indptr, rows + 1, "kv")
            self._heads, self._limits = heads, limits
            self._integers[:4] = 1

        def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> None:
            assert (q.shape[1], k.shape[1], q.shape[2]) == self._heads and len(k) == len(v) == self._keys[-1]
            if not self._integers.any():
                return  # A plan without tiles.
            lengths = torch.tensor(self._keys).diff()
            table = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int32)
            for row, start in enumerate(self._keys[:-1]):
                table[row, : lengths[row]] = torch.arange(start, self._keys[row + 1])
            window = self._limits["window_left"]
            out[:] = paged_attention(
                q,
                k.unsqueeze(1),
                v.unsqueeze(1),
                table,
                torch.tensor(self._queries),
                lengths,
                scale=self._limits["sm_scale"],
                window=None if window < 0 else window + 1,
                soft_cap=self._limits["logits_soft_cap"],
            )

    class Latent(Base):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            use_cuda_graph: bool = False,
            qo_indptr: torch.Tensor | None = None,
            kv_indptr: torch.Tensor | None = None,
            kv_indices: torch.Tensor | None = None,
            kv_len_arr: torch.Tensor | None = None,
            backend: str = "auto",
        ) -> None:
            super().__init__(float_workspace_buffer)
            assert backend in ("fa2", "fa3")
            self._graph, self._buffers, self._pages = use_cuda_graph, [qo_indptr, kv_indptr, kv_len_arr], kv_indices

        def plan(
            self,
            qo_indptr: torch.Tensor,
            kv_indptr: torch.Tensor,
            kv_indices: torch.Tensor,
            kv_len_arr: torch.Tensor,
            num_heads: int,
            head_dim_ckv: int,
            head_dim_kpe: int,
            page_size: int,
            causal: bool,
            sm_scale: float,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:
            assert not device.capturing, "a plan cannot be captured"
            rows = len(qo_indptr) - 1
            queries = rising(qo_indptr, rows + 1, "qo_indptr")
            pages, lengths = rising(kv_indptr, rows + 1, "kv_indptr"), indices(kv_len_arr, rows, "kv_len_arr")
            assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, True) and q_data_type == kv_data_type
            assert 128 % num_heads == 0, "a query whose heads are in two tiles may not see its own key"
            assert all(length >= 1 for length in lengths)
            assert all(-(-n // page_size) <= b - a for n, a, b in zip(lengths, pages, pages[1:], strict=False))
            if self._graph:
                assert len(kv_indices) == 0 and len(self._buffers[0]) == rows + 1 and pages[-1] <= len(self._pages)
                for buffer, host in zip(self._buffers, (qo_indptr, kv_indptr, kv_len_arr), strict=True):
                    device.copy(host, lambda buffer=buffer, host=host: buffer.copy_(host))
            else:
                assert len(kv_indices) == pages[-1]
                self._pages = kv_indices.clone()
            # How many programs work together depends on the queries there are on average.
            self._launch = (num_heads, page_size, sm_scale, queries[-1] * num_heads // rows > 64)
            self._dtype = q_data_type
            plan = {"launch": self._launch, "queries": queries, "pages": pages, "lengths": lengths}
            self.write_plan(torch.tensor(queries + pages + lengths), plan)

        def run(
            self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, *, out: torch.Tensor
        ) -> None:
            assert self._planned is not None, "run before plan"
            self = device.launched(self)
            heads, page_size, scale, _ = self._launch
            assert q_nope.shape[1:] == (heads, 512) and q_pe.shape[1:] == (heads, 64) and out.shape == q_nope.shape
            assert ckv.shape[1:] == (page_size, 512) and kpe.shape[1:] == (page_size, 64)
            assert {each.dtype for each in (q_nope, q_pe, ckv, kpe, out)} == {self._dtype}
            plan = self.read_plan(self._launch)
            counts = [-(-length // page_size) for length in plan["lengths"]]
            table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
            for row, (count, start) in enumerate(zip(counts, plan["pages"], strict=False)):
                table[row, :count] = self._pages[start : start + count]
            keys = torch.cat((kpe, ckv), dim=-1).unsqueeze(2)
            starts, lengths = torch.tensor(plan["queries"]), torch.tensor(plan["lengths"])
            q = torch.cat((q_pe, q_nope), dim=-1)
            found = paged_attention(q, keys, keys[..., 64:], table, starts, lengths, scale=scale)
            out[: starts[-1]] = found[: starts[-1]]

    def build(*arguments: Any) -> None:
        device.allowed.wait(600)
        device.built.append(arguments)

    return {
        "prefill": {
            "BatchPrefillWithPagedKVCacheWrapper": Paged,
            "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
            "get_batch_prefill_module": build,
        },
        "mla": {"BatchMLAPagedAttentionWrapper": Latent, "get_batch_mla_module": build},
    }


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Pretends that the package is installed, and a GPU is there for it."""
    device = Device()
    whole = types.ModuleType("flashinfer")
    whole.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", whole)
    for name, content in module_for(device).items():
        module = types.ModuleType(f"flashinfer.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", module)
    mark = type("Mark", (FakeMark,), {"device": device})
    for user in (attention, replay):
        monkeypatch.setattr(user, "Mark", mark)
        monkeypatch.setattr(user, "WORKSPACE", 1 << 26)

    def gather_pages(table: torch.Tensor, page_start: torch.Tensor, out: torch.Tensor) -> None:
        """A kernel in the stream comes behind the copies that were launched before it."""
        device.drain()
        pages.gather_pages(table, page_start, out)

    monkeypatch.setattr(replay, "gather_pages", gather_pages)
    monkeypatch.setattr(replay, "capturing", lambda: device.capturing)
    compiled.compiling.cache_clear()
    yield device
    device.allowed.set()
    compiled.compiling.cache_clear()


def wait_for_kernels(name: str, spec: Any, dtype: torch.dtype = torch.float32) -> None:
    for part in select._entry(name, spec).parts:
        if issubclass(part, compiled.CompiledBackend):
            for kernel in part.wants(spec, dtype, torch.device("cpu")):
                compiled.compiling(kernel).join(600)
