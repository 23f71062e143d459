"""The commands `lmdeploy kv-store ls`, `rm` and `stat`."""

from __future__ import annotations

import argparse

from lmdeploy.cli.engine_flags import add_log_level


def add_kv_store_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to `lmdeploy kv-store`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    for name, run, text in (
        ("stat", _stat, "show the number and size of the stored blocks"),
        ("ls", _list, "list the stored blocks: name, bytes, seconds since the last use"),
        ("rm", _remove, "remove stored blocks"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("url", help="address of the store, as for --kv-store")
        if name == "rm":
            command.add_argument(
                "names", nargs="*", metavar="NAME", help="blocks, as ls shows them"
            )
            command.add_argument("--all", action="store_true", help="remove every block")
        add_log_level(command)
        command.set_defaults(run=run)


def _stat(args: argparse.Namespace) -> int:
    from lmdeploy.kv_store.address import open_store

    entries = list(open_store(args.url).entries())
    num_bytes = sum(entry.num_bytes for entry in entries)
    print(f"{len(entries):,} blocks, {num_bytes:,} bytes ({num_bytes / 2**20:.1f} MiB)")
    return 0


def _list(args: argparse.Namespace) -> int:
    from lmdeploy.kv_store.address import open_store

    for entry in open_store(args.url).entries():
        age = "-" if entry.age is None else f"{entry.age:.0f}"
        print(entry.name, entry.num_bytes, age)
    return 0


def _remove(args: argparse.Namespace) -> int:
    from lmdeploy.kv_store.address import open_store

    if bool(args.names) == args.all:
        raise ValueError("kv-store rm needs the names of blocks or --all.")
    store = open_store(args.url)
    names = [entry.name for entry in store.entries()] if args.all else args.names
    removed = sum(store.remove(name) for name in names)
    print(f"{removed:,} blocks removed")
    return 0 if args.all or removed == len(names) else 1
