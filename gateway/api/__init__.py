"""The HTTP routes. Each does three things: parse, ask the gateway's parts, answer.

`wire` has what they share; the other files are one group of endpoints each.
"""
