"""The final message of a stream: what was used and what the cache did."""

from google.protobuf import duration_pb2

from scissorhands.budget import HALF_BYTES, ModelShape
from scissorhands.v1 import generation_pb2, recall_pb2
from scissorhands_server.worker.task import Finished, Task

_REASONS = {
    "eos": generation_pb2.FINISH_REASON_EOS,
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}


def finish_message(task: Task, finished: Finished, shape: ModelShape) -> generation_pb2.Finish:
    """Write the final message of a task that has ended well."""
    prompt = len(task.request.prompt)
    # The last token was chosen but never appended.
    appended = len(task.ids) - 1
    done = task.statistics
    return generation_pb2.Finish(
        reason=_REASONS[finished.reason],
        stop=finished.stop,
        usage=generation_pb2.Usage(
            prompt_tokens=prompt,
            generated_tokens=task.generated,
            queue_time=_duration(task.started - task.arrived),
            time_to_first_token=_duration(task.first_token - task.arrived),
            decode_time=_duration(task.last_token - task.first_token),
            prefix_tokens=task.prefix.tokens if task.prefix else 0,
        ),
        cache=generation_pb2.CacheStatistics(
            full_bytes=shape.full_bytes(len(task.ids)),
            allocated_bytes=task.grant.bytes,
            full_16bit_bytes=shape.full_bytes(len(task.ids), HALF_BYTES),
            evictions=done.evictions,
            evicted_slots=done.evicted_slots,
            mass_dropped=done.mass_dropped / (appended * max(1, len(shape.global_layers)) * shape.kv_heads),
            plans_manager=done.plans_manager,
            plans_local=done.plans_local,
            prefill_stall=_duration(done.prefill_stall),
            segments=done.segments,
            segment_bytes=done.segment_bytes,
            segments_dropped=done.segments_dropped,
            suspended_bytes=task.turn.stored_bytes if task.turn else 0,
            recalled_slots=task.recall.slots if task.recall else 0,
            recalled_sections=task.recall.sections if task.recall else 0,
            recall_misses=[
                recall_pb2.RecallMiss(reason=reason, count=count)
                for reason, count in sorted((task.recall.misses if task.recall else {}).items())
            ],
        ),
        quality=task.quality.message(),
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
    return message
