"""Hacking cases: filed once, found again by what is peculiar to them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable

import pytest

from exemplar_store import ExemplarStore
from exemplar_store import hacking_cases as module
from exemplar_store.errors import StoreUsageError
from exemplar_store.hacking_cases import HackingCase, HackingCases, grams, most_similar, read_cases

FAMILIES = {
    "timing_channel", "deferred_work", "replay", "phase_detection", "seed_precompute", "numeric_tolerance",
    "shape_dtype_alias", "precision", "in_process_tampering", "ipc_forging", "file_env_tampering", "reference_sabotage",
    "not_a_kernel", "resource_abuse", "cross_candidate_leakage", "statistics_gaming",
}  # fmt: skip


def case(code: str, family: str = "replay") -> HackingCase:
    return HackingCase(family=family, reason="caching", code=code, explanation="It does not do the work.")


@pytest.fixture
def cases(store: ExemplarStore) -> HackingCases:
    seeded = HackingCases(store)
    seeded.seed()
    return seeded


def test_the_package_brings_a_case_of_every_family(cases: HackingCases) -> None:
    found = cases.all()
    assert {one.family for one in found} == FAMILIES
    for one in found:
        assert "class ModelNew" in ast.unparse(ast.parse(one.code))
    assert cases.seed() == 0, "seeding twice adds nothing"


def test_grams_by_hand() -> None:
    """Tokens f ( x ): four runs of one, three of two, two of three; comments and layout are not counted."""
    counted = grams("f( x )  # a comment\n")
    assert Counter(len(gram) for gram in counted.elements()) == {1: 4, 2: 3, 3: 2}
    assert counted == grams("f(x)")


REWRITTEN = {
    "replay": """
        class ModelNew(nn.Module):
            memory = dict()
            def forward(self, inputs):
                address = inputs.data_ptr()
                if address not in self.memory:
                    self.memory[address] = inputs.softmax(dim=1)
                return self.memory[address]
    """,
    "precision": """
        class ModelNew(nn.Module):
            def forward(self, left, right):
                return torch.mm(left.half(), right.half()).float()
    """,
    "deferred_work": """
        import threading
        class ModelNew(nn.Module):
            def forward(self, values):
                result = torch.empty_like(values)
                worker = threading.Thread(target=lambda: result.copy_(values.exp()))
                worker.start()
                return result
    """,
    "timing_channel": """
        class ModelNew(nn.Module):
            def __init__(self):
                self.other = torch.cuda.Stream()
            def forward(self, x):
                with torch.cuda.stream(self.other):
                    return x.sum(dim=-1)
    """,
}


@pytest.mark.parametrize("family", sorted(REWRITTEN))
def test_a_rewritten_hack_finds_its_family_first(cases: HackingCases, family: str) -> None:
    found = cases.similar(REWRITTEN[family])
    assert len(found) == 3
    assert found[0][0].family == family
    similarities = [similarity for _, similarity in found]
    assert similarities == sorted(similarities, reverse=True)
    assert 0.2 < similarities[0] < 1


def test_a_case_is_most_similar_to_itself(cases: HackingCases) -> None:
    everything = cases.all()
    for one in everything:
        (nearest, similarity), *_ = most_similar(one.code, everything, 1)
        assert nearest == one
        assert similarity == pytest.approx(1)


def test_strange_texts_have_neighbours_too(cases: HackingCases) -> None:
    assert len(cases.similar("")) == 3
    assert [similarity for _, similarity in cases.similar("\x00 \u00fc (((")] == sorted(
        (similarity for _, similarity in cases.similar("\x00 \u00fc (((")), reverse=True
    )
    assert most_similar("x", [], 3) == []


def test_the_same_code_in_another_layout_is_the_same_case(cases: HackingCases) -> None:
    assert cases.add([case("a = {}\nb = a"), case("a = {}  # kept\n\nb = a"), case("a = {}\nb = a", "precision")]) == 2


def test_a_run_adds_what_is_new_and_not_what_is_nearly_known(
    cases: HackingCases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rewritten replay is new; renamed in one place it adds nothing; under another family it does; a store
    that holds enough takes no more."""
    before = len(cases.all())
    code = REWRITTEN["replay"]
    assert cases.learn(case(code))
    assert not cases.learn(case(code))
    assert not cases.learn(case(code.replace("address", "where")))
    assert cases.learn(case(code, "precision"))
    assert len(cases.all()) == before + 2
    monkeypatch.setattr(module, "MOST", before + 2)
    assert not cases.learn(case(REWRITTEN["timing_channel"], "timing_channel"))


def test_cases_round_trip_as_lines(cases: HackingCases, open_store: Callable[..., ExemplarStore]) -> None:
    lines = [one.to_json() for one in cases.all()]
    other = HackingCases(open_store(namespace="elsewhere"))
    assert other.add(read_cases(lines)) == len(lines)
    assert other.all() == cases.all()


@pytest.mark.parametrize(("line", "words"), [("{", "line 2"), ('{"family": "x"}', "line 2 .* reason"), ("7", "line 2")])
def test_a_bad_line_is_named(line: str, words: str) -> None:
    with pytest.raises(StoreUsageError, match=words) as caught:
        list(read_cases([case("x").to_json(), line]))
    assert "\n" not in str(caught.value)
