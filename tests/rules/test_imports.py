"""A package imports only from the packages before it, as docs/architecture.md lists them."""

from __future__ import annotations

import re

import pytest

from rules.source import PACKAGE, ROOT, Module, imports, modules

PACKAGES: list[set[str]] = [
    {"errors"},
    {"host"},
    {"options"},
    {"choices"},
    {"sampling_params", "outputs"},
    {"model_spec"},
    {"option_groups"},
    {"config"},
    {"metrics"},
    {"kv"},
    {"core"},
    {"routing"},
    {"text", "sources"},
    {"constrain"},
    {"sim"},
    # Below this line torch is allowed.
    {"kernels"},
    {"parallel"},
    {"cache"},
    {"attention"},
    {"layers"},
    {"quant"},
    {"weights"},
    {"models"},
    {"multimodal"},
    {"sampling"},
    {"runner"},
    {"resolve"},
    {"engine"},
    {"startup"},
    {"parity"},
    {"processes"},
    {"frontend"},
    {"server"},
    {"deploy"},
    {"bench"},
    {"cli"},
]
"""Lowest layer first; packages of one set may import each other."""

TORCH_LINE = PACKAGES.index({"sim"})
LAYER = {package: layer for layer, packages in enumerate(PACKAGES) for package in packages}


def test_the_page_lists_the_packages_in_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^headrace/\n((?: .*\n)+)", page, flags=re.MULTILINE)
    listed = [name for line in tree.splitlines() for name in re.findall(r"(\w+)(?:/|\.py)(?=  )", line[:40])]
    there = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__init__", "__pycache__"}
    assert set(listed) == there
    assert [LAYER[name] for name in listed] == sorted(LAYER[name] for name in listed)


def name_of(module: Module) -> str:
    return module.name


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_imports_point_down(module: Module) -> None:
    if module.name == "headrace":
        return
    assert module.package in LAYER, f"{module.where}: {module.package} is not in PACKAGES"
    wrong = [
        f"{module.where}:{line} imports {name}"
        for line, name in imports(module)
        if name.startswith("headrace.") and name.split(".")[1] in LAYER and LAYER[name.split(".")[1]] > LAYER[module.package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_no_torch_above_the_line(module: Module) -> None:
    if module.name != "headrace" and LAYER[module.package] > TORCH_LINE:
        return
    wrong = [f"{module.where}:{line} imports {name}" for line, name in imports(module) if name.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


def test_only_modules_named_for_it_import_triton() -> None:
    """It is optional, and takes long to import: whoever imports another module need not think of it."""
    found = {module.where for module in modules() for _, name in imports(module) if name.split(".")[0] == "triton"}
    assert found
    assert {where for where in found if not where.rpartition("/")[2].startswith("triton")} == set()


def test_the_public_names_are_loaded_late() -> None:
    """``import headrace`` alone must not pay for torch."""
    (top,) = (module for module in modules() if module.name == "headrace")
    typed = {f"headrace.{name}" for name in ("frontend.adapters", "frontend.async_llm", "frontend.llm", "sampling_params")}
    assert {name for _, name in imports(top) if name.startswith("headrace.")} <= typed


def test_the_imports_are_seen() -> None:
    """Without this, the rules would also pass if no import were found."""
    found = {name for module in modules() for _, name in imports(module)}
    assert {"headrace.errors", "headrace.model_spec", "torch"} <= found
    lazy = {name for module in modules() if module.name == "headrace.cli.serve" for _, name in imports(module)}
    assert "headrace.server.run" in lazy
