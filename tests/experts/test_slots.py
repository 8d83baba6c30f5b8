"""Which expert gives way: traces worked out by hand, and random ones against a simulation."""

import random

import pytest

from tests.experts.simulation import Simulation
from turbospark_mlx.errors import OptionError
from turbospark_mlx.experts.slots import SlotTable


def use(table, *wanted, protected=()):
    plan = table.plan(wanted, protected)
    table.commit(plan)
    return plan


def test_cold_misses_take_slots_from_the_first_on():
    plan = use(SlotTable(4, 9), 7, 2, 5)
    assert (plan.slots, plan.misses, plan.hits) == ((0, 1, 2), (0, 1, 2), 0)


def test_an_expert_is_a_hit_only_after_commit():
    table = SlotTable(3, 9)
    first = table.plan([4])
    assert table.plan([4]).misses == (0,)
    table.commit(first)
    assert table.plan([4]).misses == ()


def test_slots_come_in_the_order_of_what_was_wanted():
    table = SlotTable(4, 9)
    use(table, 1, 2, 3)
    plan = use(table, 8, 3, 1)
    assert (plan.experts, plan.slots, plan.misses) == ((8, 3, 1), (3, 2, 0), (0,))


def test_the_least_used_gives_way():
    table = SlotTable(2, 9, "lfu")
    for wanted in (1, 1, 2, 2, 2, 1, 1):
        use(table, wanted)
    # Expert 1 has 4 uses, expert 2 has 3 and was used before it.
    assert use(table, 5).slots == (1,)
    # 5 has one use, and an expert that was thrown out keeps its count.
    assert use(table, 2).slots == (1,)
    assert table.use_count[:6] == [0, 4, 4, 0, 0, 1]
    # Equal counts: the one not used for longest.
    assert use(table, 7).slots == (0,)


def test_the_least_recently_used_gives_way():
    table = SlotTable(2, 9, "lru")
    for wanted in (1, 1, 1, 2, 1):
        use(table, wanted)
    assert use(table, 5).slots == (1,)
    assert use(table, 6).slots == (0,)


@pytest.mark.parametrize(("policy", "slot"), [("lfu", 0), ("lru", 1)])
def test_an_empty_slot_has_no_privilege_under_lru(policy, slot):
    table = SlotTable(2, 9, policy)
    use(table, 1, 2)
    use(table, 2)
    # Its read fails, so that slot 0 is empty, and younger than slot 1.
    assert table.plan([5]).slots == (0,)
    assert table.plan([6]).slots == (slot,)


def test_a_protected_slot_can_be_hit_but_not_taken():
    table = SlotTable(2, 9)
    use(table, 1, 2)
    plan = table.plan([1, 5], protected=[0])
    assert plan.slots == (0, 1)


def test_what_cannot_be_placed_changes_nothing():
    table = SlotTable(2, 9)
    use(table, 1, 2)
    before = (table.expert_of[:], table.last_use[:], table.use_count[:])
    assert table.plan([1, 5], protected=[1]) is None
    assert table.plan([3, 4, 5]) is None
    assert (table.expert_of, table.last_use, table.use_count) == before
    assert use(table, 5).slots == (0,)


def test_a_failed_read_leaves_its_slot_empty_and_its_use_counted():
    table = SlotTable(2, 9)
    use(table, 1, 2)
    table.plan([5])
    assert table.expert_of == [-1, 2]
    assert 1 not in table
    assert table.use_count[5] == 1
    assert table.plan([5]).slots == (0,)


def test_an_unknown_policy_is_refused():
    with pytest.raises(OptionError, match="expert_policy='fifo': possible are lfu, lru"):
        SlotTable(2, 4, "fifo")


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_random_traces_equal_a_simulation(policy):
    rng = random.Random(5)
    for slots in (1, 3, 8, 12):
        table, simulated = SlotTable(slots, 12, policy), Simulation(slots, 12, policy)
        for _ in range(300):
            wanted = rng.sample(range(12), rng.randint(1, slots))
            protected = rng.sample(range(slots), rng.randint(0, slots - len(wanted)))
            assert list(use(table, *wanted, protected=protected).slots) == simulated.want(wanted, protected)
            assert (table.use_count, table.last_use) == (simulated.uses, simulated.last)
