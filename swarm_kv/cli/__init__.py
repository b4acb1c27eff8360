"""The command `swarm-kv`: one file per command, each with one line here."""

from __future__ import annotations

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"swarm-kv needs {error.name}: pip install 'swarm-kv[demo]'") from None

from . import bench, demo, doctor, evaluate, plan, plot, profile, record, stats, tune

app = typer.Typer(
    help="KV cache of long-context language models on several SSDs.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """KV cache of long-context language models on several SSDs."""


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("eval")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("record")(record.record)
app.command("profile")(profile.profile)
app.command("tune")(tune.tune)
app.command("stats")(stats.stats)
app.command("plot")(plot.plot)
