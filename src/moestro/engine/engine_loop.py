"""The engine's own thread: commands in, step reports out, asleep when there is nothing to do."""

import logging

from moestro.core.messages import (
    AbortRequest,
    AddRequest,
    Channel,
    EngineFailed,
    KVAnswer,
    KVCommand,
    Shutdown,
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
        engine.close()
        channel.close()


def _serve(engine: Engine, channel: Channel) -> None:
    accepting = True
    while accepting or engine.has_work():
        idle = accepting and not engine.has_work()
        command = channel.receive(_idle_s(engine) if idle else 0.0)
        while command is not None:
            if isinstance(command, KVCommand):
                channel.send(_answer(engine, command))
            else:
                accepting = _obey(engine, command, accepting)
            command = channel.receive(0.0)
        if engine.has_work():
            channel.send(engine.step())


def _idle_s(engine: Engine) -> float | None:
    """How long to listen when there is no work; None: until something is said."""
    return _TEND_S if engine.tend() else None


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


def _answer(engine: Engine, command: KVCommand) -> KVAnswer:
    try:
        return KVAnswer(command.command_id, engine.answer(command.command))
    except MoestroError as error:
        return KVAnswer(command.command_id, error=str(error))


def _tell_failure(channel: Channel, message: str) -> None:
    try:
        channel.send(EngineFailed(message))
    except BrokenPipeError:
        logger.debug("nobody is left to hear that the engine failed")
