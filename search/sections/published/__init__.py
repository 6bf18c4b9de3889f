"""`report.published`: a paper's figures and claims beside ours."""
