"""Plans of micro-batches, for lengths of all kinds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.trainer.micro_batches import dealt, micro_batches, planned

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


@given(sizes=LENGTHS, parts=st.integers(1, 5))
def test_parts_differ_by_no_more_than_the_largest_size(sizes: list[int], parts: int) -> None:
    result = dealt(sizes, parts)
    assert len(result) == parts
    assert sorted(index for part in result for index in part) == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in part) for part in result]
    assert max(totals) - min(totals) <= max(sizes, default=0)


@given(lengths=LENGTHS, budget_tokens=st.integers(1, 200), packed=st.booleans())
def test_micro_batches_keep_to_the_budget_unless_one_sequence_has_more(
    lengths: list[int], budget_tokens: int, packed: bool
) -> None:
    result = list(micro_batches(lengths, budget_tokens, packed=packed))
    assert sorted(index for chosen in result for index in chosen) == list(range(len(lengths)))
    for chosen in result:
        own = [lengths[index] for index in chosen]
        tokens = sum(own) if packed else len(own) * max(own)
        assert tokens <= budget_tokens or len(own) == 1


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget_tokens=st.integers(1, 200), packed=st.booleans())
def test_all_ranks_make_equally_many_passes_if_they_must(
    lengths: list[int], ranks: int, budget_tokens: int, packed: bool
) -> None:
    even = planned(lengths, ranks, budget_tokens, packed=packed, even=True)
    uneven = planned(lengths, ranks, budget_tokens, packed=packed, even=False)
    assert len({len(own) for own in even}) == 1
    assert [[chosen for chosen in own if chosen] for own in even] == uneven
    assert len(even[0]) == max(map(len, uneven)), "and none that all of them make for nothing"


@pytest.mark.parametrize(("packed", "passes"), [(False, [[1, 2], [0]]), (True, [[1, 2, 0]])])
def test_padding_counts_unless_packed(packed: bool, passes: list[list[int]]) -> None:
    assert list(micro_batches([8, 1, 1], 10, packed=packed)) == passes
