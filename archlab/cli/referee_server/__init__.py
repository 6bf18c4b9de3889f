"""The referee as a server of the Model Context Protocol: `archlab mcp`.

`desk` answers each question with JSON and knows nothing of the protocol, `tools` lists the questions, `serve` answers
them over the protocol.
"""
