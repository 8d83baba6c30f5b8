"""The slots of one layer in a few lines, written from the rules alone, with what they read and hit."""


class Simulation:
    def __init__(self, slots, experts, policy):
        self.held, self.last = [None] * slots, [0] * slots
        self.uses, self.policy, self.clock = [0] * experts, policy, 0
        self.hits, self.read = 0, []

    def worth(self, slot):
        """What is given up first is worth least."""
        if self.policy == "lru":
            return (self.last[slot], slot)
        expert = self.held[slot]
        return (0, 0, self.last[slot], slot) if expert is None else (1, self.uses[expert], self.last[slot], slot)

    def want(self, experts, protected=()):
        self.clock += 1
        found = {expert: self.held.index(expert) for expert in experts if expert in self.held}
        free = sorted(set(range(len(self.held))) - set(found.values()) - set(protected), key=self.worth)
        assert len(free) >= len(experts) - len(found)
        for expert in experts:
            self.uses[expert] += 1
            if expert in found:
                self.hits += 1
                self.last[found[expert]] = self.clock
            else:
                found[expert] = free.pop(0)
                self.read.append(expert)
                self.held[found[expert]], self.last[found[expert]] = expert, self.clock
        return [found[expert] for expert in experts]

    def chunk(self, rows):
        """Experts in order of first appearance; where there are too many, those that are here, then half the slots at
        a time, beside the batch before where there is room."""
        wanted = list(dict.fromkeys(expert for row in rows for expert in row))
        if len(wanted) <= len(self.held):
            self.want(wanted)
            return
        half = max(1, len(self.held) // 2)
        batch = [expert for expert in wanted if expert in self.held]
        left = [expert for expert in wanted if expert not in self.held]
        if not batch:
            batch, left = left[:half], left[half:]
        taken = self.want(batch)
        while left:
            room = len(self.held) - len(taken)
            count, protected = (min(room, half), taken) if room else (half, ())
            batch, left = left[:count], left[count:]
            taken = self.want(batch, protected)
