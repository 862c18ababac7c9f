"""A package imports only from the packages before it, as docs/architecture.md lists them."""

from __future__ import annotations

import re

from rules.source import PACKAGE, ROOT, imports, modules

PACKAGES: list[set[str]] = [
    {"errors"},
    {"host"},
    {"options"},
    {"choices"},
    {"sampling_params", "pooling_params", "outputs"},
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


def test_imports_point_down() -> None:
    """Every package has a layer: ``test_the_page_lists_the_packages_in_order``."""
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        if module.name != "headrace"
        for line, name in imports(module)
        if name.startswith("headrace.") and LAYER.get(name.split(".")[1], 0) > LAYER[module.package]
    ]
    assert wrong == []


def test_no_torch_above_the_line() -> None:
    above = [module for module in modules() if module.name == "headrace" or LAYER[module.package] <= TORCH_LINE]
    found = ((module.where, line, name) for module in above for line, name in imports(module))
    assert [f"{where}:{line} imports {name}" for where, line, name in found if name.split(".")[0] == "torch"] == []


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
