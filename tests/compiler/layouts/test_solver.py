"""Variable elimination against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import law
from weft.compiler.layouts.dominated import Table, without_dominated
from weft.compiler.layouts.solver import minimize

Problem = tuple[list[Table], dict[tuple[int, int], Table]]


def random_problem(seed: int, variables: int, edges: int, largest: int = 4) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, largest + 1, variables)
    unary = [rng.integers(0, 20, size).astype(float) for size in sizes]
    pairwise = {}
    for _ in range(edges):
        i, j = (int(v) for v in rng.choice(variables, 2, replace=False))
        pairwise[i, j] = rng.integers(0, 20, (sizes[i], sizes[j])).astype(float)
    return unary, pairwise


def cost_of(choices: tuple[int, ...], problem: Problem) -> float:
    unary, pairwise = problem
    own = sum(table[c] for table, c in zip(unary, choices, strict=True))
    return float(own + sum(table[choices[i], choices[j]] for (i, j), table in pairwise.items()))


def brute_force(problem: Problem) -> float:
    return min(
        cost_of(choices, problem)
        for choices in product(*(range(len(table)) for table in problem[0]))
    )


@pytest.mark.parametrize("seed", range(30))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed, variables=6, edges=seed % 12)
    found = minimize(*problem)
    assert found.exact
    assert found.cost == cost_of(found.choices, problem) == brute_force(problem)


def test_a_limit_makes_the_result_unproven_but_whole() -> None:
    problem = random_problem(1, variables=7, edges=30)
    exact, limited = minimize(*problem), minimize(*problem, limit=8)
    assert exact.exact
    assert not limited.exact
    assert limited.cost == cost_of(limited.choices, problem)
    assert exact.cost <= limited.cost <= 1.3 * exact.cost


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_is_below_the_least_cost(seed: int) -> None:
    problem = random_problem(seed, variables=7, edges=16)
    limited = minimize(*problem, limit=8)
    assert limited.bound <= brute_force(problem) <= limited.cost
    assert limited.exact == (limited.bound == limited.cost)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_out_is_dominated(seed: int) -> None:
    unary, pairwise = random_problem(seed, variables=6, edges=seed % 8)
    left = without_dominated(unary, pairwise)
    fewer = [table[kept] for table, kept in zip(unary, left, strict=True)]
    pairs = {(i, j): table[np.ix_(left[i], left[j])] for (i, j), table in pairwise.items()}
    assert brute_force((fewer, pairs)) == brute_force((unary, pairwise))


def test_equal_choices_leave_the_first() -> None:
    left = without_dominated([np.zeros(3), np.array([1.0, 0.0])], {(0, 1): np.zeros((3, 2))})
    assert [list(kept) for kept in left] == [[0], [1]]


@law(80)
@given(st.data())
def test_a_start_is_never_made_worse(data: st.DataObject) -> None:
    """Of random starts, and of the best there is, which a search in small tables misses."""
    seed, variables = data.draw(st.integers(0, 9999)), data.draw(st.integers(2, 8))
    problem = random_problem(seed, variables, edges=data.draw(st.integers(0, 40)))
    anything = st.tuples(*(st.integers(0, len(table) - 1) for table in problem[0]))
    best = minimize(*problem)
    starts = data.draw(st.lists(anything | st.just(best.choices), max_size=3))
    found = minimize(*problem, limit=data.draw(st.integers(1, 64)), starts=starts)
    assert found.cost == cost_of(found.choices, problem) >= best.cost
    assert all(found.cost <= cost_of(start, problem) for start in starts)


def test_small_costs_count_beside_large_ones() -> None:
    unary = [np.array([1e17, 1e17]), np.array([0.0, 1.0])]
    found = minimize(unary, {(0, 1): np.array([[2.0, 0.0], [1.0, 3.0]])})
    assert found.choices in ((0, 1), (1, 0))


def test_single_changes_cannot_improve_an_unproven_result() -> None:
    problem = random_problem(2, variables=8, edges=40)
    found = minimize(*problem, limit=4)
    for variable, table in enumerate(problem[0]):
        for choice in range(len(table)):
            other = (*found.choices[:variable], choice, *found.choices[variable + 1 :])
            assert cost_of(other, problem) >= found.cost


def test_ties_go_to_the_first_choice() -> None:
    assert minimize([np.zeros(3), np.zeros(2)], {(0, 1): np.zeros((3, 2))}).choices == (0, 0)


def test_no_variables() -> None:
    assert minimize([], {}) == ((), 0.0, 0.0)


def test_a_long_chain_with_a_hub_is_exact_and_fast() -> None:
    rng = np.random.default_rng(3)
    count = 3000
    unary = [rng.random(5) for _ in range(count)]
    pairwise = {(i, i + 1): rng.random((5, 5)) for i in range(count - 1)}
    pairwise |= {(0, i): rng.random((5, 5)) for i in range(2, count, 10)}
    found = minimize(unary, pairwise, limit=1000)
    assert found.exact


def test_a_variable_with_one_choice_takes_no_dimension() -> None:
    leaves = 100  # numpy's arrays have at most 64 dimensions
    unary = [np.array([1.0]) for _ in range(leaves)] + [np.array([3.0, 0.0])]
    pairwise = {(i, leaves): np.array([[0.0, 1.0]]) for i in range(leaves)}
    found = minimize(unary, pairwise)
    assert found.choices[leaves] == 0
    assert (found.cost, found.exact) == (103.0, True)


def test_a_variable_with_one_choice_may_have_any_number_of_neighbours() -> None:
    unary = [np.ones(1), *(np.array([3.0, 1.0]) for _ in range(100))]
    found = minimize(unary, {(0, i): np.array([[0.0, 5.0]]) for i in range(1, 101)})
    assert found == ((0,) * 101, 301.0, 301.0)
