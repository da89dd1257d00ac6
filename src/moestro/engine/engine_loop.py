"""The engine's own thread: commands in, step reports out, asleep when there is nothing to do."""

import logging

from moestro.core.kv_hints import HintAnswer, PrefixUse
from moestro.core.messages import (
    AbortRequest,
    AddRequest,
    Channel,
    EngineFailed,
    KVAnswer,
    KVCommand,
    Shutdown,
    StepReport,
)
from moestro.engine.engine import Engine
from moestro.errors import MoestroError

logger = logging.getLogger(__name__)

_TEND_S = 0.02
"""While pages sink and nobody asks for anything, the engine looks after them so often."""


def run_engine_loop(engine: Engine, channel: Channel) -> None:
    """Serve `channel` until Shutdown or until its other end closes, then close both.

    An exception is reported as EngineFailed, so that nobody waits for an answer for ever.
    """
    try:
        _serve(engine, channel)
    except (EOFError, BrokenPipeError):
        logger.debug("the engine's client has gone")
    except Exception as error:
        logger.exception("the engine loop died")
        _tell_failure(channel, f"{type(error).__name__}: {error}")
    finally:
        try:
            engine.close()
        finally:
            channel.close()


def _serve(engine: Engine, channel: Channel) -> None:
    accepting, is_moving = True, False
    while accepting or engine.has_work():
        timeout_s: float | None = 0.0
        if accepting and not engine.has_work():
            was_moving, is_moving = is_moving, engine.tend()
            if is_moving or was_moving:
                channel.send(_statistics(engine))
            timeout_s = _TEND_S if is_moving else None
        command = channel.receive(timeout_s)
        while command is not None:
            if isinstance(command, KVCommand):
                _answer(engine, channel, command)
            else:
                accepting = _obey(engine, command, accepting)
            command = channel.receive(0.0)
        if engine.has_work():
            channel.send(engine.step())


def _statistics(engine: Engine) -> StepReport:
    """What changes without a step: hints, pages that sink."""
    return StepReport(stats=engine.stats())


def _obey(engine: Engine, command: object, accepting: bool) -> bool:
    """Carry out a command; False once no further request is accepted."""
    match command:
        case AddRequest(request):
            if not accepting:
                engine.refuse(request, "The engine is shutting down.")
                return False
            try:
                engine.add_request(request)
            except MoestroError as error:
                engine.refuse(request, str(error))
        case AbortRequest(request_id):
            engine.abort(request_id)
        case Shutdown(drain):
            if not drain:
                engine.abort_all()
            return False
        case _:
            raise TypeError(f"not an engine command: {command!r}")
    return accepting


def _answer(engine: Engine, channel: Channel, command: KVCommand) -> None:
    """Have a command answered, now or once the store has answered."""

    def tell(answer: HintAnswer | PrefixUse) -> None:
        channel.send(_statistics(engine))  # first, so that metrics never lag behind
        channel.send(KVAnswer(command.command_id, answer))

    try:
        engine.answer(command.command, tell)
    except MoestroError as error:
        channel.send(KVAnswer(command.command_id, error=str(error)))


def _tell_failure(channel: Channel, message: str) -> None:
    try:
        channel.send(EngineFailed(message))
    except BrokenPipeError:
        logger.debug("nobody is left to hear that the engine failed")
