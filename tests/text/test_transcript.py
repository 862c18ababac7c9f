"""No token reaches across the end of a special token: what is behind it may be encoded on its own."""

from __future__ import annotations

from array import array

from support import vocabularies

from headrace.server.transcript import Transcript
from headrace.text.tokenizer import Tokenizer


def test_the_tokens_of_a_text_are_those_of_its_parts_around_a_special_token(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    assert end in tokenizer.token_bytes.special
    mark = tokenizer.token_text(end)
    starts = ["", " a", "A mill\n"]
    for start in starts:
        said = tokenizer.encode(start + mark, add_special_tokens=False)
        transcript = Transcript((start + mark).encode(), array("i", said))
        for text in ["", "\n", " ", "\n\n", "x", mark, *vocabularies.PROBES]:
            whole = start + mark + text
            expected = tokenizer.encode(whole, add_special_tokens=False)
            assert transcript.continued(tokenizer, [whole]) == expected, whole
            assert transcript.continued(tokenizer, [start, mark + text]) == expected
        assert transcript.continued(tokenizer, [f"b{start}{mark}"]) is None


def test_there_is_no_cut_where_the_tokenizer_makes_one_token_of_both_sides(embedded: Tokenizer) -> None:
    (letter,) = embedded.encode("a")
    transcript = Transcript(b"a", array("i", [letter]))
    assert transcript.continued(embedded, ["a."]) == embedded.encode("a.")
    assert transcript.continued(embedded, ["and"]) is None
