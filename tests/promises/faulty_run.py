"""Runs a tool with a fault in one of its file operations: ``faulty_run.py PLAN TOOL ARGUMENTS...``, PLAN as JSON."""

import json
import runpy
import sys

from injector import Injector, Plan

plan, tool = sys.argv[1:3]
parts = json.loads(plan)
parts["operation"] = parts["operation"] and tuple(parts["operation"])
Injector(Plan(**parts)).install()
sys.argv = sys.argv[2:]
runpy.run_path(tool, run_name="__main__")
