"""Reports: one HTML file that shows a plan, a simulation, a search or a run; it opens from disk, without a network."""

from weft.report.content import Report as Report
from weft.report.content import write_report as write_report
