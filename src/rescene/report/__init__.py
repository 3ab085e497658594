"""Reports from run folders: one self-contained page, figures, tables. Reads files only; matplotlib loads on drawing."""

from rescene.report.groups import comparison_rows
from rescene.report.load import RunRecord, load_run
from rescene.report.page import write_report

__all__ = ["RunRecord", "comparison_rows", "load_run", "write_report"]
