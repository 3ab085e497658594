"""Reports from run folders: one self-contained page, figures, tables. Reads files only; matplotlib loads on drawing."""

from rescene.report.groups import comparison_rows
from rescene.report.page import write_report
from rescene.report.runs import Run, load_run

__all__ = ["Run", "comparison_rows", "load_run", "write_report"]
