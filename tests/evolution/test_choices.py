"""Selection and mutation, by hand and by property."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import groupwise as gw
from groupwise.config.evolution import GrowShrinkCfg, HalvingCfg, RangeCfg, TournamentCfg, TruncationCfg
from groupwise.evolution.population import check_search

RANKING = [2, 0, 3, 1]
SELECTIONS = [
    TournamentCfg(),
    TournamentCfg(size=3, elitism=False),
    TruncationCfg(),
    TruncationCfg(share=0.5),
    HalvingCfg(),
]
RULES = [GrowShrinkCfg(), GrowShrinkCfg(probability=1.0), GrowShrinkCfg(probability=0.0)]


class Drawn(Random):
    """Draws these numbers."""

    def __init__(self, *numbers):
        super().__init__(0)
        self.numbers = list(numbers)

    def randrange(self, stop):
        return self.numbers.pop(0)


@pytest.mark.parametrize(
    ("selection", "alive", "drawn", "places"),
    [
        (TournamentCfg(size=2), 4, (3, 1, 2, 2, 0, 3), [(2, False), (0, True), (3, True), (2, True)]),
        (TournamentCfg(size=1, elitism=False), 4, (3, 1, 2, 0), [(1, True), (0, True), (3, True), (2, True)]),
        (TruncationCfg(share=0.25), 4, (0,), [(2, False), (0, False), (3, False), (2, True)]),
        (TruncationCfg(share=0.5), 4, (1, 0), [(2, False), (0, False), (0, True), (2, True)]),
        (TruncationCfg(), 1, (0, 0, 0), [(2, False), (2, True), (2, True), (2, True)]),  # the others diverged
        (HalvingCfg(), 4, (), [(2, False), (0, False)]),
        (HalvingCfg(factor=4), 4, (), [(2, False)]),
    ],
)
def test_who_survives_and_who_is_cloned(selection, alive, drawn, places):
    assert selection.select(RANKING, alive, Drawn(*drawn)) == places


@given(
    st.sampled_from(SELECTIONS),
    st.integers(2, 9).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.integers(1, n))),
    st.randoms(use_true_random=False),
)
def test_only_members_that_did_not_diverge_go_on_or_are_cloned(selection, members, random):
    ranking, alive = members
    places = selection.select(ranking, alive, random)
    assert {place.member for place in places} <= set(ranking[:alive])
    going_on = [place.member for place in places if not place.clone]
    assert len(set(going_on)) == len(going_on)
    if not isinstance(selection, HalvingCfg):
        assert len(places) == len(ranking)


@pytest.mark.parametrize(
    ("value", "space", "after"),
    [
        (1.0, RangeCfg(min=0.1, max=10), {1.2, 0.8}),
        (2, RangeCfg(min=1, max=64), {1, 3}),  # small whole numbers move by one
        (10, RangeCfg(min=1, max=64), {8, 12}),
        (10.0, RangeCfg(min=0.1, max=10), {10 / 1.2, 8.0}),  # and away from a bound
        (9, RangeCfg(min=1, max=9), {8, 7}),
        (1, RangeCfg(min=1, max=9), {2}),
        (-10, RangeCfg(min=-10, max=-1), {-8}),
        (0, RangeCfg(min=0, max=2), {0, 1, 2}),  # no factor moves it
        (2, (1, 2, 4), {1, 4}),
        (4, (1, 2, 4), {2}),  # turns at the end
    ],
)
def test_numbers_change_by_a_fifth_and_choices_move_to_a_neighbour(value, space, after):
    rule = GrowShrinkCfg(probability=1.0)
    assert {rule.mutate({"a": value}, {"a": space}, Random(seed))["a"] for seed in range(20)} == after


@pytest.mark.parametrize("rule", RULES)
def test_zero_is_left_again(rule):
    assert all(0 < rule.mutate({"a": 0.0}, {"a": RangeCfg(min=0, max=1)}, Random(seed))["a"] <= 1 for seed in range(9))


@given(st.sampled_from(RULES), st.floats(1e-3, 1.0), st.integers(1, 9), st.sampled_from("abc"), st.integers(0, 1000))
def test_mutations_stay_in_the_space_and_change_something(rule, rate, size, kind, seed):
    search = {"rate": RangeCfg(min=1e-3, max=1.0, log=True), "size": RangeCfg(min=1, max=9), "kind": ("a", "b", "c")}
    before = {"rate": rate, "size": size, "kind": kind}
    after = rule.mutate(before, search, Random(seed))
    assert 1e-3 <= after["rate"] <= 1.0
    assert type(after["size"]) is int
    assert 1 <= after["size"] <= 9
    assert after["kind"] in search["kind"]
    assert after != before


@given(st.floats(1e-6, 1.0), st.floats(1.001, 1e3), st.booleans(), st.randoms(use_true_random=False))
def test_first_values_are_within_the_bounds(low, factor, log, random):
    space = RangeCfg(min=low, max=low * factor, log=log)
    assert space.min <= space.draw(random) <= space.max


def test_a_logarithmic_range_draws_each_decade_alike():
    random, space = Random(0), RangeCfg(min=1e-4, max=1.0, log=True)
    share = sum(space.draw(random) < 1e-2 for _ in range(2000)) / 2000
    assert abs(share - 0.5) < 0.05


@pytest.mark.parametrize("wrong", [{"min": 2, "max": 1}, {"min": 0, "max": 1, "log": True}, {"min": 1}, [1]])
def test_a_wrong_space_is_refused(wrong):
    with pytest.raises(gw.errors.ConfigError, match="search"):
        gw.config.EvolutionCfg(search={"algorithm.learning_rate": wrong})


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({}, "search: got {}; expected settings by path"),
        ({3: [1, 2]}, "search: got {3: "),
        ({"x": None}, "search.x: got None; expected bounds, as {'min': 1e-5, 'max': 1e-2}, or a list of at least two"),
        ({"x": [1]}, "search.x: got [1]; expected"),
        ({"x": {1, 2}}, "search.x: got {1, 2}; expected"),
        ({"x": [1, [2]]}, "search.x: got [2]; expected"),
        ({"x": [1, math.inf]}, "search.x: got inf; expected"),
        ({"x": {"min": 1}}, "search.x: max is missing; fix: give it"),
        ({"x": {"min": 2, "max": 1}}, "search.x: min=2, max=1: expected min < max"),
        ({"x": {"min": "a", "max": 1}}, "search.x: min = 'a': input should be a valid number"),
        ({"x": {"min": 1, "max": 2, "lgo": True}}, "search.x: unknown key 'lgo'; did you mean 'log'?"),
    ],
)
def test_a_wrong_search_is_refused_in_one_line(search, message):
    with pytest.raises(gw.errors.ConfigError) as raised:
        gw.config.EvolutionCfg(search=search)
    assert str(raised.value).startswith(f"EvolutionCfg: {message}")
    assert "\n" not in str(raised.value)
    assert "function-" not in str(raised.value)


def test_a_search_of_an_unknown_setting_names_those_of_that_name():
    base = gw.config.resolve("CartPole-v1", "ppo")
    with pytest.raises(
        gw.errors.ConfigError, match=r"no setting 'algorithm\.lr'; did you mean algorithm\.learning_rate\?"
    ):
        check_search({"algorithm.lr": (1e-3, 1e-4)}, base)


def test_a_search_names_no_programs():
    """A population may come from a stranger."""
    server = {"name": "server", "python": "/usr/bin/python3"}
    base = gw.config.resolve_text("grpo", task={"data": "a.jsonl", "rewards": [{"name": "exact"}]}, model={"path": "m"})
    served = base.model_copy(
        update={"generation": type(base).model_validate(base.model_dump() | {"generation": server}).generation}
    )
    for path, values, of in (
        ("generation.python", ("/bin/a", "/bin/b"), served),
        ("generation.args", (("--a",), ("--b",)), served),
        ("generation", (server, "model"), base),
    ):
        with pytest.raises(gw.errors.ConfigError, match=f"search: {path}"):
            check_search({path: values}, of)
