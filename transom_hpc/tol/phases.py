"""The launcher's state machine: what to do next, decided from what happened. Pure: no clock, process, file or Slurm.

`TABLE` names, for each event in each phase, the rule that answers it; `-` changes nothing. `LEADS` says where each rule
may lead. Both are drawn in docs/architecture.md.
"""

from __future__ import annotations

from typing import get_args

from transom_hpc.tol.events import Event
from transom_hpc.tol.rules import RULES
from transom_hpc.tol.state import Decision, Phase, Run

_TABLE = """
          starting  launching  running  settling  pausing    stopping  requeueing  standing by
Placed    place     -          -        -         -          -         -           -
Restored  -         begin      -        -         -          -         -           -
Progress  -         go_on      go_on    -         -          note      -           -
Exited    -         exit       exit     -         -          leave     -           -
HostBad   lose      replace    replace  replace   lose       lose      lose        -
Hung      -         hang       hang     -         -          -         -           -
Diverged  -         -          diverge  -         -          -         -           -
StopAsked stop      ask        ask      stop      stop       insist    -           give_way
Isolated  isolate   isolate    isolate  isolate   isolate    isolate   -           -
Expired   -         -          -        probe     launch     stop_hard -           come_back
Unwatched -         probe      -        -         -          -         -           -
Probed    -         sift       -        blame     -          -         -           -
Requeued  -         -          -        -         -          -         answer      -
Ended     -         -          -        -         -          -         -           follow
"""

AGAIN = (Phase.LAUNCHING, Phase.PAUSING, Phase.REQUEUEING, Phase.OVER)
"""Where a restart may lead: to a launch, now or after a pause; to the queue; or to the end, for want of budget."""
LEADS: dict[str, tuple[Phase, ...]] = {
    "place": (Phase.LAUNCHING, Phase.REQUEUEING, Phase.OVER),
    "begin": (),
    "go_on": (Phase.RUNNING, Phase.ASIDE, *AGAIN),  # a host that could wait is replaced now
    "note": (),
    "exit": (Phase.SETTLING, Phase.REQUEUEING, Phase.OVER),
    "leave": (Phase.REQUEUEING, Phase.OVER),
    "lose": (Phase.ASIDE,),
    "replace": (Phase.ASIDE, *AGAIN),
    "hang": AGAIN,
    "diverge": AGAIN,
    "stop": (Phase.REQUEUEING, Phase.OVER),
    "ask": (Phase.STOPPING,),
    "insist": (),
    "give_way": (Phase.OVER,),
    "isolate": (Phase.ASIDE,),
    "probe": (),
    "launch": (Phase.LAUNCHING,),
    "stop_hard": (Phase.REQUEUEING, Phase.OVER),
    "come_back": (Phase.REQUEUEING, Phase.OVER),
    "sift": AGAIN,
    "blame": AGAIN,
    "answer": (Phase.OVER,),
    "follow": (Phase.OVER,),
}
"""The phases that a rule may lead to, beside the one that it is in."""


def decide(run: Run, event: Event) -> Decision:
    """What to do about an event.

    Returns:
        The run as it is now, and the actions to take, in order.
    """
    rule = TABLE.get((run.phase, type(event)), "-")
    return (run, ()) if rule == "-" else RULES[rule](run, event)


def _read(text: str) -> dict[tuple[Phase, type[Event]], str]:
    """The table as it stands above: a line an event, a column a phase, two spaces or more between columns."""
    head, *lines = text.strip("\n").splitlines()
    phases = [phase for phase in Phase if phase is not Phase.OVER]
    assert head.split("  ")[-1] == phases[-1], "the columns are the phases, in their order"
    kinds: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
    return {
        (phase, kinds[name]): rule
        for name, *rules in (line.split() for line in lines)
        for phase, rule in zip(phases, rules, strict=True)
    }


TABLE = _read(_TABLE)
"""The name of the rule for each event in each phase; "-" where it changes nothing. In `Phase.OVER` nothing does."""
