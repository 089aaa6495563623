"""Parses the timestamps of log lines into seconds since 1970 on the writer's clock."""

import calendar
import re
import time
from dataclasses import dataclass
from functools import lru_cache

_MONTHS = {
    name: at
    for at, name in enumerate(("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1)
}
_ISO = re.compile(
    r"(?P<year>20\d\d|19[789]\d)[-/](?P<month>\d\d?)[-/](?P<day>\d\d?)[T _](?P<h>\d\d?):(?P<m>\d\d):(?P<s>\d\d)"
    r"(?:[.,](?P<f>\d{1,9}))?\s?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_COMPACT = re.compile(
    r"(?<!\d)(?P<year>20\d\d)(?P<month>0[1-9]|1[0-2])(?P<day>[0-3]\d)-(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"
    r"(?:[.,](?P<f>\d{1,9}))?"
)
_GLOG = re.compile(
    r"\b[IWEFDC](?P<year>20\d\d)?(?P<month>\d\d?)(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:\.(?P<f>\d{3,9}))?"
)
_SYSLOG = re.compile(
    r"\b(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d\d?) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"
    r"(?:\.(?P<f>\d+))?(?: (?P<half>AM|PM))?(?: [A-Z]{3,4})?(?: (?P<year>20\d\d))?"
)
_US_DATE = re.compile(
    r"\b(?P<month>0[1-9]|1[0-2])/(?P<day>\d\d)/(?P<year>20\d\d),? "
    r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
)
"""The format of the transformers and accelerate examples."""
_VLLM_DATE = re.compile(r"\b(?P<month>\d\d)-(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)")
_EPOCH = re.compile(r"\"(?:t|ts|time|timestamp)\": ?(?P<t>1[5-9]\d{8}(?:\.\d+)?)(?P<ms>\d{3})?\b")
_TIME_OF_DAY = re.compile(
    r"(?:^|[\[ ])(?P<h>[01]\d|2[0-3]):(?P<m>[0-5]\d):(?P<s>[0-5]\d)(?:[.,](?P<f>\d+))?(?=[\] ,|]|$)"
)
_HEAD_CHARS = 240
"""Characters of a line that are searched for a timestamp."""
DAY_S = 86_400.0
UNDATED_YEAR = 2000
"""The year given to timestamps in a file that does not name the year."""
_YEAR = re.compile(
    r"(?:^|[\s\[\"T])(20\d\d)-[01]\d-[0-3]\d[ T_]|\"t\": ?(1[5-9]\d{8})\b"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} .{0,24}?\b(20\d\d)\b|\b[01]\d/[0-3]\d/(20\d\d)[ ,]",
    re.MULTILINE,
)


@dataclass(slots=True)
class TimestampParser:
    """Parses the timestamps of one file; earlier full dates supply a missing year or day."""

    year: int = 0
    day: float = 0.0
    _last: float = 0.0

    def read(self, line: str) -> float | None:
        """Returns the timestamp of a line; None if it has none."""
        head = line[:_HEAD_CHARS]
        found = _ISO.search(head) or _COMPACT.search(head)
        if found:
            self.year = int(found["year"])
            return self._remember_day(_seconds_since_epoch(found, self.year, int(found["month"])))
        if "." in head:
            found = _GLOG.search(head)
            if found:
                return self._remember_day(
                    _seconds_since_epoch(found, int(found["year"] or self._year()), int(found["month"]))
                )
        if '"' in head:
            found = _EPOCH.search(head)
            if found:
                at = float(found["t"]) + int(found["ms"] or 0) / 1000
                self.year = time.gmtime(at).tm_year
                return self._remember_day(at)
        found = _US_DATE.search(head) if "/" in head else None
        if found:
            self.year = int(found["year"])
            return self._remember_day(_seconds_since_epoch(found, self.year, int(found["month"])))
        found = _SYSLOG.search(head)
        if found:
            month = _MONTHS[found["name"].lower()]
            return self._remember_day(_seconds_since_epoch(found, int(found["year"] or self._year()), month))
        found = _VLLM_DATE.search(head)
        if found and 1 <= int(found["month"]) <= 12:
            return self._remember_day(_seconds_since_epoch(found, self._year(), int(found["month"])))
        found = _TIME_OF_DAY.search(head[:120]) if self.day else None
        if not found:
            return None
        at = self.day + int(found["h"]) * 3600 + int(found["m"]) * 60 + float(f"{found['s']}.{found['f'] or 0}")
        return at if at > self._last - DAY_S / 2 else at + DAY_S

    def _year(self) -> int:
        return self.year or UNDATED_YEAR

    def _remember_day(self, at: float | None) -> float | None:
        if at is not None:
            self.day, self._last = at - at % DAY_S, at
        return at


def find_year(text: str) -> int:
    """Returns the year of the first full date in a text; 0 if there is none."""
    found = _YEAR.search(text)
    if found is None:
        return 0
    return int(found[1] or found[3] or found[4] or time.gmtime(int(found[2])).tm_year)


def move_to_year(at: float, year: int) -> float:
    """Returns the same date and time in another year."""
    date = time.gmtime(at)
    return calendar.timegm((year, *date[1:6], 0, 0, 0)) + at % 1.0


@lru_cache(maxsize=64)
def _midnight(year: int, month: int, day: int) -> int:
    return calendar.timegm((year, month, day, 0, 0, 0, 0, 0, 0))


def _seconds_since_epoch(found: re.Match[str], year: int, month: int) -> float | None:
    day, fraction = int(found["day"]), found["f"] if "f" in found.re.groupindex else None
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    hours, minutes = int(found["h"]), int(found["m"])
    half = found["half"] if "half" in found.re.groupindex else None
    hours = hours % 12 + 12 * (half == "PM") if half else hours
    at = _midnight(year, month, day) + 3600 * hours + 60 * minutes + int(found["s"])
    zone = found["zone"] if "zone" in found.re.groupindex else None
    if zone and zone != "Z":
        sign = -1 if zone[0] == "-" else 1
        at -= sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return at + (float(f"0.{fraction}") if fraction else 0.0)
