"""Explain, compare and check configs."""

import argparse
import json
import shutil

from hookline.command_line import add_options

EXAMPLE = "hookline config explain SOLVER.BASE_LR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of each of the five tools."""
    tools = parser.add_subparsers(dest="tool", required=True, metavar="explain|diff|check|list|schema")
    explain = tools.add_parser("explain", help="what a key, a section or a component means")
    explain.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="such as SOLVER.BASE_LR, SOLVER, EMA; default: all"
    )
    diff = tools.add_parser("diff", help="the keys in which two configs differ, old → new")
    diff.add_argument("old", metavar="OLD", help="a config file, or the folder of a run")
    diff.add_argument("new", metavar="NEW", help="the other one")
    check = tools.add_parser("check", help="whether a run would accept a config; touches nothing")
    check.add_argument("config_file", metavar="FILE", help="a config file")
    check.add_argument("--full", action="store_true", help="also build data and model, as train --dry-run")
    add_options(check, "trainer")
    check.add_argument("opts", nargs="*", metavar="KEY VALUE", help="overrides, as of train")
    registries = tools.add_parser("list", help="registries, or the components of one")
    registries.add_argument("registry", nargs="?", metavar="REGISTRY", help="such as model or hook; default: all")
    schema = tools.add_parser("schema", help="the JSON schema of config files, for editors")
    schema.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="add the components that this module registers (may be repeated)",
    )


def main(args: argparse.Namespace) -> None:
    """Run one tool."""
    width = min(shutil.get_terminal_size().columns, 120)
    if args.tool == "diff":
        from hookline.config.compare import differences, resolved

        print(differences(resolved(args.old), resolved(args.new), width) or "The configs are equal.")
    elif args.tool == "check":
        _check(args)
    else:
        _describe(args, width)


def _describe(args: argparse.Namespace, width: int) -> None:
    from hookline.config.explain import explain, list_components, list_registries
    from hookline.config.registry import import_module
    from hookline.engine.setup.schema import SLOTS, schema_of_configs

    if args.tool == "explain":
        print(explain(args.key, SLOTS, width))
    elif args.tool == "list":
        print(list_components(args.registry, SLOTS, width) if args.registry else list_registries(SLOTS, width))
    else:
        for module in args.modules:
            import_module(module)
        print(json.dumps(schema_of_configs(), indent=1, ensure_ascii=False))


def _check(args: argparse.Namespace) -> None:
    from hookline.engine import check_config
    from hookline.engine.options import check_options, merge_options
    from hookline.engine.program.run import run_trainer

    if args.full or args.trainer:
        args.dry_run = True
        run_trainer(args)
        return
    cfg = merge_options(args)
    check_options(args, cfg)
    check_config(cfg)
    print(f"{args.config_file}: valid")
