"""Whether the hosts can be reached, and what time they have."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.cluster.checks.common import Verdict, by_host, ok
from hvdtrain.cluster.models import Evidence, Finding
from hvdtrain.errors import StartError

MAX_SKEW_S = 1.0
# In the order in which a login passes them -> the faults that stop it there.
_STAGES = (
    ("name", {"name"}),
    ("port", {"refused", "timeout", "unreachable"}),
    ("host-key", {"host-key-unknown", "host-key-changed"}),
    ("ssh", {"key-file", "login", "closed", "configuration", "no-ssh", "other", "start"}),
    ("answer", {"no-python", "old-python", "ended", "silent", "garbage", "too-much", "refused-probe"}),
)
_EXPECTED = {
    "name": "a name that can be resolved",
    "port": "sshd listening",
    "host-key": "the known host key",
    "ssh": "a login without a prompt",
    "answer": "an answer of the probe",
}


def check(evidence: Evidence) -> list[Finding]:
    """Name, port, host key, login and answer of each host, in that order; and clocks."""
    findings = []
    for number, (stage, kinds) in enumerate(_STAGES):
        earlier = {kind for _, others in _STAGES[:number] for kind in others}

        def judge(host: str, stage: str = stage, kinds: set[str] = kinds, earlier: set[str] = earlier) -> Verdict:
            fault = evidence.unreached.get(host)
            if fault is None:
                return ok()
            if fault.kind in kinds:
                return "fail", fault.what, _EXPECTED[stage], fault.fix
            return ("skip", "not reached", "", "") if fault.kind in earlier else ok()

        findings += by_host(evidence, "reach", stage, judge, evidence.names)
    return [
        *findings,
        *_key_checks(evidence),
        *_both_ways(evidence),
        *by_host(evidence, "reach", "clock", _clock(evidence)),
        *_network(evidence),
    ]


def _key_checks(evidence: Evidence) -> list[Finding]:
    def judge(host: str) -> Verdict:
        if host not in evidence.unchecked_keys:
            return ok()
        fix = "take StrictHostKeyChecking no out of your ssh configuration"
        return "warn", "your ssh configuration turns host-key checks off", "checked host keys", fix

    return by_host(evidence, "reach", "key-checks", judge, evidence.names)


def _both_ways(evidence: Evidence) -> list[Finding]:
    reason = "hvdtrain's launch needs no ssh from host to host"
    return [Finding("reach", "ssh-both-ways", evidence.names, "skip", reason)]


def _clock(evidence: Evidence) -> Callable[[str], Verdict]:
    def judge(host: str) -> Verdict:
        if host not in evidence.clocks:
            return "skip", "its clock wasn't read", "", ""
        offset, error = evidence.clocks[host]
        if abs(offset) - error <= MAX_SKEW_S:
            return ok()
        way = "ahead" if offset > 0 else "behind"
        fix = "start chrony or systemd-timesyncd there"
        return "fail", f"{abs(offset):.0f} s {way} of this machine", f"at most {MAX_SKEW_S:g} s", fix

    return judge


def _network(evidence: Evidence) -> list[Finding]:
    """Whether the hosts reach each other, and not only this machine them."""
    network = evidence.network
    if network is None:
        why = "only this machine" if evidence.reached else "not reached"
        return [Finding("reach", "network", evidence.names, "skip", why)]
    cut_off = network.cut_off(evidence.reached) if len(evidence.reached) > 1 else ()
    at_fault = cut_off if len(cut_off) < len(evidence.reached) - 1 else ()
    linked = tuple(host for host in evidence.reached if host not in at_fault)
    expected = "a network over which all hosts reach each other"
    findings = []
    if at_fault:
        fix = "see whether a firewall drops connections between hosts; the job needs all TCP ports"
        findings.append(Finding("reach", "network", at_fault, "fail", "no other host reaches it", expected, fix))
    try:
        network.choose(linked)
        findings.append(Finding("reach", "network", linked, "ok"))
    except StartError as error:
        named = tuple(host for host in linked if host == error.where) or linked
        findings.append(Finding("reach", "network", named, "fail", error.what, expected, error.fix or ""))
        if others := tuple(host for host in linked if host not in named):
            findings.append(Finding("reach", "network", others, "ok"))
    return findings
