"""BuiltEngine: an engine with everything around it that was decided when it was built."""

from dataclasses import dataclass

from moestro.chat.templates import ChatTemplate
from moestro.config import EngineConfig
from moestro.core.kv_events import KVEventSink
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import Plan
from moestro.engine.engine import Engine
from moestro.engine.input_processor import InputProcessor
from moestro.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """What engine.build wires together."""

    config: EngineConfig
    spec: ModelSpec
    plan: Plan
    engine: Engine
    processor: InputProcessor
    chat_template: ChatTemplate
    event_sink: KVEventSink | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.processor.tokenizer
