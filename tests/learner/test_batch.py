from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.attention import Segment
from learner.batch import TokenSequence, pack, pad, split_padded, split_shared

A = TokenSequence((1, 2, 3), (4, 5))
B = TokenSequence((1, 2, 3), (6,))
C = TokenSequence((7,), (8, 9))


def test_pad_by_hand() -> None:
    """Rows hold all but the last token, rounded up to 4; targets of row 0 are predicted from places 2 and 3."""
    batch = pad([A, C], pad_id=0, multiple=4)
    assert batch.input_ids_bt.tolist() == [[1, 2, 3, 4], [7, 8, 0, 0]]
    assert batch.source_n.tolist() == [2, 3, 4, 5]
    assert batch.target_n.tolist() == [4, 5, 8, 9]
    assert batch.sequence_n.tolist() == [0, 0, 1, 1]
    assert batch.segments is None


def test_pack_shares_the_prompt_by_hand() -> None:
    """A and B share 1 2 3; B's only token is a target alone, so it takes no place in the row."""
    batch = pack([A, B, C])
    assert batch.input_ids_bt.tolist() == [[1, 2, 3, 4, 7, 8]]
    assert batch.position_ids_bt.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.source_n.tolist() == [2, 3, 2, 4, 5]
    assert batch.target_n.tolist() == [4, 5, 6, 8, 9]
    assert batch.sequence_n.tolist() == [0, 0, 1, 2, 2]
    assert batch.segments == (Segment(0, 3), Segment(3, 4, 0, 3), Segment(4, 5), Segment(5, 6, 4, 5))


def test_split_shared_keeps_a_prompt_together_as_far_as_it_fits() -> None:
    """Each completion takes 3 places, the prompt 4: two fit in 10, the third starts a row with its prompt again."""
    sequences = [TokenSequence((1, 2, 3, 4), (5, 5, 5, 5))] * 3
    assert split_shared(sequences, 10) == [[0, 1], [2]]
    assert split_shared(sequences, 13) == [[0, 1, 2]]
    assert split_shared(sequences, 1) == [[0], [1], [2]]


def test_split_shared_starts_a_row_rather_than_compute_a_prompt_twice() -> None:
    """Two prompts of 4 with two completions of 3 each, so 10 a prompt: in rows of 18 neither is split."""
    sequences = [TokenSequence((prompt,) * 4, (5, 5, 5, 5)) for prompt in (1, 1, 2, 2)]
    assert split_shared(sequences, 18) == [[0, 1], [2, 3]]
    assert split_shared(sequences, 20) == [[0, 1, 2, 3]]


tokens = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.builds(TokenSequence, tokens, tokens), min_size=1, max_size=8), st.integers(1, 40))
def test_each_sequence_lies_in_one_micro_batch(sequences: list[TokenSequence], row_tokens: int) -> None:
    shared, padded = split_shared(sequences, row_tokens), split_padded([len(s) for s in sequences], row_tokens)
    for rows in (shared, padded):
        assert sorted(i for row in rows for i in row) == list(range(len(sequences)))
    for row in shared:
        assert len(row) == 1 or pack([sequences[i] for i in row]).tokens <= row_tokens
    for row in padded:
        assert len(row) == 1 or len(row) * max(len(sequences[i]) for i in row) <= row_tokens
