"""What comes after a campaign's runs: gates, intervals, and the report, as HTML, JSON, PNG and Markdown."""

from __future__ import annotations

from understudy.campaigns.report.page import markdown, write

__all__ = ["markdown", "write"]
