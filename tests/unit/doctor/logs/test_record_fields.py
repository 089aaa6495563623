"""Who wrote a structured record."""

import pytest

from lockstep.doctor.logs.line_origin import LineOrigin, origin_of_line


@pytest.mark.parametrize(
    ("line", "origin"),
    [
        ('{"ts": 1.5, "level": "info", "rank": 3, "host": "nd-4", "msg": "step 2"}', LineOrigin(3, "nd-4")),
        (
            '{"time": "2026-11-28", "severity": "INFO", "service": "judge-1", "message": "up"}',
            LineOrigin(role="judge-1"),
        ),
        ('ts=2026-11-28T20:30:03Z level=info svc=sampler-0 msg="ready"', LineOrigin(role="sampler-0")),
        ('ts=2026-11-28T20:30:03Z level=info component="kv/store" rank=2 msg=up', LineOrigin(2, role="kv/store")),
        ('{"msg": "no service: none", "step": 3}', LineOrigin()),
        ("service=sampler-0 is only text", LineOrigin()),
        (
            "<14>1 2026-11-28T20:23:18.573133Z nd-2 train 4017 out - [rank1]: words",
            LineOrigin(1, "nd-2", pid=4017),
        ),
        ("<27>1 2026-11-28T20:23:21Z nd-3 systemd - - - words", LineOrigin(host="nd-3")),
    ],
)
def test_the_origin_of_a_record(line: str, origin: LineOrigin) -> None:
    assert origin_of_line(line, ())[0] == origin
