"""A blueprint's result as a JUnit report: one case for the program, and one for each bound."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tandem.blueprints.description import Blueprint
from tandem.blueprints.running import BlueprintResult

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may have, such as colours of a terminal."""


def junit_report(blueprint: Blueprint, result: BlueprintResult) -> str:
    cases = [("trains", result.error, "error")]
    cases += [
        (f"{name} is {bound}", result.violations.get(name, ""), "failure")
        for name, bound in blueprint.metrics.items()
        if not result.error
    ]
    suite = ElementTree.Element(
        "testsuite",
        name=f"blueprint {blueprint.name}",
        tests=str(len(cases)),
        errors=str(int(bool(result.error))),
        failures=str(len(result.violations)),
        time=str(result.seconds),
    )
    about = ElementTree.SubElement(suite, "properties")
    for name, value in {"model": result.model, **result.values, **result.numbers}.items():
        ElementTree.SubElement(about, "property", name=name, value=_NO_XML.sub("", str(value)))
    for name, message, kind in cases:
        seconds = str(result.seconds) if name == "trains" else "0"
        case = ElementTree.SubElement(
            suite, "testcase", classname=blueprint.name, name=name, time=seconds
        )
        if message:
            ElementTree.SubElement(case, kind, message=_NO_XML.sub("", message))
    ElementTree.indent(suite)
    text: str = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
    return text
