"""The name table works both ways."""

from __future__ import annotations

import pytest
import torch
from support.models.export import export
from torch import nn

from headrace.weights.names import NameTable, Target


def table() -> NameTable:
    out = NameTable()
    out.add("model.norm.weight", "norm.weight")
    out.fuse("qkv.weight", {"q.weight": 4, "k.weight": 2, "v.weight": 3})
    out.tie("lm_head.weight", "norm.weight")
    return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5, bias=False)
        self.qkv = nn.Linear(2, 9, bias=False)


def test_both_ways() -> None:
    names = table()
    assert names.part("k.weight") == Target("qkv.weight", 4, 6)
    assert names.part("model.norm.weight") == Target("norm.weight")
    assert names.part("lm_head.weight") is None
    assert names.part("other") is None
    assert names.names("qkv.weight") == ["q.weight", "k.weight", "v.weight"]
    assert names.parameters() == ["norm.weight", "qkv.weight"]
    assert names.tied("lm_head.weight") == "norm.weight"
    assert names.tied("q.weight") is None
    assert names.all_names() == ["model.norm.weight", "q.weight", "k.weight", "v.weight", "lm_head.weight"]
    with pytest.raises(KeyError):
        names.names("other")


def test_parts_cover_their_parameter_once() -> None:
    whole = torch.arange(9)
    pieces = [part.view(whole) for name, part in table().items() if part.parameter == "qkv.weight"]
    assert torch.equal(torch.cat(pieces), whole)
    pieces[1][:] = -1
    assert whole.tolist() == [0, 1, 2, 3, -1, -1, 6, 7, 8]


def test_parts_of_a_stack() -> None:
    names = NameTable()
    for expert in range(3):
        names.fuse("gate_up", {f"{expert}.gate": 2, f"{expert}.up": 2}, index=expert)
        names.add(f"{expert}.down", "down", index=expert)
    gate_up, down = torch.zeros(3, 4, 5), torch.zeros(3, 5, 2)
    for value, (_, part) in enumerate(names.items(), start=1):
        part.view({"gate_up": gate_up, "down": down}[part.parameter]).fill_(value)
    assert gate_up[..., 0].tolist() == [[1, 1, 2, 2], [4, 4, 5, 5], [7, 7, 8, 8]]
    assert down[:, 0, 0].tolist() == [3, 6, 9]


def test_ignorable_names() -> None:
    assert table().ignored("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not table().ignored("model.layers.3.self_attn.rotary_emb.inv_freq.weight")
    assert NameTable(ignorable=[r"mtp\..*"]).ignored("mtp.weight")
    assert not NameTable(ignorable=[r"mtp\..*"]).ignored("x.rotary_emb.inv_freq")


def test_a_name_stands_once() -> None:
    names = table()
    with pytest.raises(ValueError, match=r"k\.weight"):
        names.add("k.weight", "k.weight")


def test_export() -> None:
    model = Model()
    exported = dict(export(table(), model))
    assert list(exported) == ["model.norm.weight", "q.weight", "k.weight", "v.weight"]
    assert torch.equal(exported["v.weight"], model.qkv.weight[6:9])
    exported["q.weight"].zero_()
    assert (model.qkv.weight[:4] == 0).all()
    assert not exported["q.weight"].requires_grad


def test_a_checkpoint_of_something_larger() -> None:
    """All names begin otherwise there, ties and alternatives too; what is not ours stays what it is."""
    names = NameTable(ignorable=[r"model\.old\..*", r"vision\..*"])
    names.fuse("qkv.weight", {"model.q.weight": 4, "model.k.weight": 2})
    names.instead("model.qkv.weight", "qkv.weight")
    names.tie("lm_head.weight", "norm.weight")
    names.elsewhere({"model.": "model.text."})
    names.elsewhere({"model.": "text.model.", "lm_head.": "text.lm_head."})
    assert names.chosen(["model.q.weight", "model.k.weight"]).all_names() == names.all_names()
    new = names.chosen(["model.text.q.weight", "model.text.k.weight", "vision.weight"])
    assert new.all_names() == ["model.text.q.weight", "model.text.k.weight", "lm_head.weight"]
    assert new.part("model.text.k.weight") == Target("qkv.weight", 4, 6)
    assert new.ignored("model.text.old.weight") and new.ignored("vision.weight") and not new.ignored("model.text.q.weight")
    old = names.chosen(["text.model.qkv.weight", "text.lm_head.weight"])
    assert old.names("qkv.weight") == ["text.model.qkv.weight"]
    assert old.tied("text.lm_head.weight") == "norm.weight"


def test_several_tensors_in_place_of_one() -> None:
    """All of them, where a checkpoint has one: the others are then missing."""
    names = NameTable()
    names.add("model.bias", "bias")
    names.instead({"model.a.bias": 2, "model.b.bias": 1}, "bias")
    names.elsewhere({"model.": "text."})
    assert names.chosen(["model.bias"]).names("bias") == ["model.bias"]
    other = names.chosen(["text.b.bias"])
    assert other.names("bias") == ["text.a.bias", "text.b.bias"]
    assert other.part("text.b.bias") == Target("bias", 2, 3)
