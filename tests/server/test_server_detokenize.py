"""The law of the detokenizer, against the `tokenizers` library's own decoding."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.server.detokenize import Detokenizer

shared = settings(deadline=None)


def pushed(tokenizer, ids, skip_special=True):
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@shared
@given(ids=st.lists(st.integers(0, 400), max_size=40), skip=st.booleans())
def test_pieces_concatenate_to_the_librarys_decoding(tokenizer, ids, skip):
    whole = tokenizer.encoder.decode(ids, skip_special_tokens=skip)
    assert "".join(pushed(tokenizer, ids, skip)) == whole
    assert tokenizer.decode(ids, skip_special=skip) == whole


@shared
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60))
def test_text_comes_back_and_no_piece_has_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pushed(tokenizer, ids, skip_special=False)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@shared
@given(raw=st.binary(max_size=24))
def test_any_bytes_one_at_a_time_read_as_if_at_once(tokenizer, raw):
    single = {value: idx for idx, value in enumerate(tokenizer.token_bytes) if len(value) == 1}
    pieces = pushed(tokenizer, [single[bytes([byte])] for byte in raw])
    assert "".join(pieces) == raw.decode("utf-8", errors="replace")


def test_a_character_waits_for_its_last_byte(tokenizer):
    single = {value: idx for idx, value in enumerate(tokenizer.token_bytes) if len(value) == 1}
    ids = [single[bytes([byte])] for byte in "🙂!".encode()]
    assert pushed(tokenizer, ids) == ["", "", "", "🙂", "!", ""]
    assert pushed(tokenizer, ids[:3]) == ["", "", "", "\ufffd"]


def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    assert pushed(tokenizer, [10**6, -1]) == ["", "", ""]
