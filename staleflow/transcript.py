"""The transcript of a member: what the policy had said to it in a process that is gone.

The user's function cannot be saved, so a member that had not finished is played again from its start. As long as it
asks what it asked then, it is answered from here, and no engine samples again what was sampled already.

Invariant: what an attempt takes from here is the beginning of its trajectory, token for token, with the logprobs and
versions that were recorded when an engine sampled it. From the first call that differs nothing more is taken.
"""

from collections.abc import Callable

from staleflow.types import Segment, Trajectory, Turn


class Transcript:
    """Answers the calls of one attempt.

    Args:
        said: the trajectory of an earlier attempt, as far as it had come.
        over: told once, when nothing more will be taken, how many sampled tokens were reused and how many dropped.
    """

    def __init__(self, said: Trajectory, over: Callable[[int, int], None]) -> None:
        self._said = said
        self._over = over
        self.is_over = False

    def take_turn(self, trajectory: Trajectory, injected: list[int], max_new_tokens: int) -> bool:
        """Append the turn that followed when this call was made before; False if it never was.

        A turn that had not ended comes with what had been sampled of it.
        """
        if self.is_over:
            return False
        # Not over, so there is a next turn.
        index = len(trajectory.turns)
        turn, (asked, sampled) = self._said.turns[index], self._said.turn(index)
        if asked != injected or turn.max_new_tokens != max_new_tokens:
            self.end(trajectory)
            return False
        trajectory.turns.append(Turn(len(trajectory.segments), max_new_tokens, turn.finish_reason))
        if injected:
            trajectory.segments.append(Segment(injected, sampled=False))
        trajectory.segments += sampled
        if trajectory.first_segment_s is None:
            trajectory.first_segment_s = self._said.first_segment_s
        if turn.finish_reason == "truncated":
            trajectory.truncated = True
        return True

    def turn_ended(self, trajectory: Trajectory) -> None:
        """The newest turn of ``trajectory`` has come to its end, here or on an engine."""
        if len(trajectory.turns) == len(self._said.turns):
            self.end(trajectory)

    def end(self, trajectory: Trajectory) -> None:
        """What ``trajectory`` has not taken by now it never will."""
        if self.is_over:
            return
        self.is_over = True
        turns = [self._said.turn(index)[1] for index in range(len(self._said.turns))]
        tokens = [sum(len(segment.token_ids) for segment in sampled) for sampled in turns]
        reused = sum(tokens[: len(trajectory.turns)])
        self._over(reused, sum(tokens) - reused)

    def longest(self, trajectory: Trajectory) -> Trajectory:
        """What the next attempt should know: what has been said in this one, or before if that is more."""
        behind = not self.is_over and len(trajectory.turns) < len(self._said.turns)
        return self._said if behind else trajectory
