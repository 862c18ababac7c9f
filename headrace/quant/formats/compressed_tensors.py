"""``compressed-tensors``: groups of matrices by class, name or pattern, each with number formats of weights and activations."""

from __future__ import annotations

import re

from headrace.layers.stored import ActivationCodes, ActivationScale, QuantSpec, ScaleGroup
from headrace.quant.formats.scheme import Fields, Layout, MatrixFormat, Rule, Scheme

_CLASS = re.compile(r"[A-Z]\w*")
_LAYOUTS: dict[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "scaled",
    "float-quantized": "scaled",
    "naive-quantized": "scaled",
    "nvfp4-pack-quantized": "fp4",
    "mxfp4-pack-quantized": "fp4",
}
_WIDTHS = "supported are: integers of 4 and 8 bits, floats of 8 bits, nvfp4 and mxfp4"
_HERE = "supported are: " + ", ".join(_LAYOUTS)


def compressed_tensors(fields: Fields) -> Scheme:
    sparsity = fields.within("sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise sparsity.refuse("format", "2:4 sparse matrices are not read: save the checkpoint without sparsity")
    transforms = fields.within("transform_config")
    if transforms.get("config_groups"):
        raise transforms.refuse(
            "config_groups", "its rotations would have to run with the model: save the checkpoint without transforms"
        )
    groups = fields.within("config_groups")
    named: list[Rule] = []
    classes: list[Rule] = []
    for name in groups.values:
        group = groups.within(name)
        format_ = _format(group, group.get("format") or fields.get("format"))
        for field, target in group.patterns("targets"):
            if _CLASS.fullmatch(target) is None:
                named.append(Rule(field, format_, target, fields.matcher(field, target)))
            elif format_ is not None:
                classes.append(Rule(field, format_, target, lambda module: True))
    if len({rule.format for rule in classes}) > 1:
        # Names of classes are those of another library's modules: of several, none can be told from a checkpoint.
        classes = [rule for rule in classes if rule.pattern == "Linear"]
    named.sort(key=lambda rule: str(rule.pattern).startswith("re:"))
    rounds_kv = fields.within("kv_cache_scheme").get("type") == "float"
    return Scheme(fields.method, (*fields.floats("ignore"), *named, *classes), rounds_kv)


def _format(group: Fields, name: object) -> MatrixFormat | None:
    """The number format of a group of matrices. ``name``: of its layout; one for each group where it says mixed-precision."""
    if group.get("output_activations"):
        raise group.refuse("output_activations", "outputs are not rounded: save the checkpoint without it")
    if group.get("weights") is None:
        return None
    weights, inputs = group.within("weights"), group.within("input_activations")
    kind, bits = weights.choice("type", ("int", "float"), "int"), weights.size("num_bits")
    named = name if name not in (None, "mixed-precision", "dense") else _inferred(kind, bits, inputs)
    layout = _LAYOUTS.get(str(named))
    if layout is None:
        raise Fields(group.method, {"format": named}, group.where).refuse("format", _HERE)
    activations, activation_codes = _activations(inputs)
    return MatrixFormat(layout, _weights(weights, kind, bits, layout, activations, activation_codes))


def _inferred(kind: str, bits: int, inputs: Fields) -> str:
    """The layout that the library chooses where none is named."""
    if kind == "float":
        return "float-quantized" if bits == 8 else "nvfp4-pack-quantized"
    return "int-quantized" if inputs.values else "pack-quantized"


def _weights(
    weights: Fields, kind: str, bits: int, layout: Layout, activations: ActivationScale, activation_codes: ActivationCodes
) -> QuantSpec:
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
        raise weights.refuse("num_bits", _WIDTHS)
    if layout == "packed" and kind == "float":
        raise weights.refuse("type", "pack-quantized has integers")
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group"))
    group: ScaleGroup = strategy if strategy in ("tensor", "channel") else "channel"
    if strategy in ("group", "tensor_group"):
        group = weights.group("group_size")
    if strategy == "block":
        structure = weights.values.get("block_structure")
        if isinstance(structure, str):
            sides = structure.split("x")
            structure = [int(side) for side in sides if side.isdecimal()]
        group = Fields(weights.method, {"block_structure": structure}, weights.where).tile("block_structure") or "channel"
    if kind == "float" and bits == 4:
        nvfp4 = strategy == "tensor_group"
        if group != ((1, 16) if nvfp4 else (1, 32)):
            raise weights.refuse("group_size", "nvfp4 has groups of 16 with a scale for the tensor, mxfp4 groups of 32")
        return QuantSpec(
            codes="nvfp4" if nvfp4 else "mxfp4",
            group=group,
            scale="e4m3" if nvfp4 else "e8m0",
            activations=activations,
            activation_codes=activation_codes,
        )
    return QuantSpec(
        codes="e4m3" if kind == "float" else "int4" if bits == 4 else "int8",
        group=group,
        zero="none" if weights.flag("symmetric", True) else "int",
        activations=activations,
        activation_codes=activation_codes,
        order="g_idx" if weights.get("actorder") in ("group", "dynamic", True) else "none",
    )


def _activations(inputs: Fields) -> tuple[ActivationScale, ActivationCodes]:
    if not inputs.values:
        return "none", "none"
    kind, bits = inputs.choice("type", ("int", "float"), "int"), inputs.size("num_bits")
    codes: ActivationCodes
    if (kind, bits) == ("float", 8):
        codes = "e4m3"
    elif (kind, bits) == ("int", 8):
        codes = "int8"
    elif (kind, bits) == ("float", 4):
        codes = "fp4"
    else:
        raise inputs.refuse("num_bits", "supported are: 8 bits, and floats of 4 bits")
    if inputs.get("dynamic") is not True:
        # nvfp4 has dynamic scales within a static one.
        return "static", codes
    return "group128" if inputs.get("strategy") == "group" and codes == "e4m3" else "token", codes
