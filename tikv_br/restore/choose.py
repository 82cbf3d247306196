"""The steps that choose what to restore, under which names, and that tell of it."""

from __future__ import annotations

from formats.errors import UnsupportedFormat
from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.errors import UsageError
from tikv_br.proof.ranges import codec_of
from tikv_br.proof.rewrite import UNCHANGED, Rewrite, stores_can
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import Mode, Via
from tikv_br.restore.plan import RestorePlan, Wanted, choose_parts, split_keys


def plan(context: RestoreContext) -> None:
    """Choose the wanted parts of the files. Raises `UsageError` where there are none, or no store can rename them so."""
    options, backup = context.options, context.backup
    rewriting = bool(options.to_keyspace) or options.rewrite_prefix != (b"", b"")
    partial = options.start or options.end or rewriting or options.keyspace is not None
    moved_to = _keyspace(context)
    for whole in backup.ranges:
        span, rewrite = whole, UNCHANGED
        if partial:
            codec = codec_of(backup.api_version, whole)
            if options.keyspace not in {None, codec.keyspace_id}:
                continue
            span = intersection(span, KeyRange(*codec.rpc_range(options.start, options.end)))
            rewrite = _rewrite(context, codec, moved_to or codec)
            span = intersection(span, rewrite.source)
        if not span.is_empty:
            context.wanted.append(Wanted(span, rewrite))
    if not context.wanted:
        raise UsageError("the backup holds nothing of the range", hint="See what the backup covers in its manifest.")
    if options.to_keyspace and len({each.rewrite.old for each in context.wanted}) > 1:
        raise UsageError(
            "--to-keyspace: the backup has several keyspaces, and they cannot all become one",
            hint="Choose one by --keyspace.",
        )
    context.parts = choose_parts(backup.files, context.wanted)


def work_out(context: RestoreContext) -> None:
    """Put the plan together for those who only want to see it; asks PD for the target's regions."""
    codec, pd = KeyCodec(context.backup.api_version), context.cluster.pd
    bounds = [(codec.bound(each.target.start), codec.bound(each.target.end)) for each in context.wanted]
    regions = {region.id: region for start, end in bounds for region in pd.scan_regions(start, end)}
    starts = {region.start for region in regions.values()}
    context.plan = RestorePlan(
        wanted=tuple(context.wanted),
        parts=tuple(context.todo),
        resumed=context.resumed_files,
        splits=tuple(
            key for key in split_keys(context.todo, context.options.region_bytes) if codec.bound(key) not in starts
        ),
        regions=len(regions),
    )


def _keyspace(context: RestoreContext) -> KeyCodec | None:
    """The keyspace to move to, by id or by name; None = none was asked for."""
    wanted = context.options.to_keyspace
    if not wanted:
        return None
    try:
        return KeyCodec(context.info.api_version, context.cluster.pd.keyspace_id(wanted))
    except UnsupportedFormat as error:
        raise UsageError(f"--to-keyspace: {error}") from None


def _rewrite(context: RestoreContext, source: KeyCodec, target: KeyCodec) -> Rewrite:
    old, new = context.options.rewrite_prefix
    rewrite = Rewrite.of(source, old, target, new)
    by_stores = context.options.mode is Mode.INGEST and context.via is not Via.UPLOAD
    if by_stores and not stores_can(source.api_version, rewrite):
        raise UsageError(
            f"--rewrite-prefix: in API V2 stores can only put a prefix of {len(new)} bytes in the place of one of "
            f"{len(old)} where the lengths are equal or differ by a multiple of 8",
            hint="Choose another prefix, or say --via upload or --mode put.",
        )
    return rewrite
