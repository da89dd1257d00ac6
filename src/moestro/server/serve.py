"""A server from a configuration: address, engine, application, and the way down."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from moestro.config import EngineConfig, ServerConfig
from moestro.core.messages import StepReport
from moestro.engine.async_engine import AsyncEngine
from moestro.metrics import ServerMetrics
from moestro.server.app import create_app
from moestro.server.engine_client import ServedModel, ServerContext
from moestro.server.lifecycle import run_app
from moestro.server.listen import url_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """An engine and the context its routes work with; run() serves until a signal."""

    engine: AsyncEngine
    context: ServerContext

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        options: ServerConfig,
        version: str,
        progress: Callable[[int, int], None] | None = None,
        graph_progress: Callable[[int, int], None] | None = None,
    ) -> "Server":
        """Load the model and start the engine. progress: (bytes read, bytes in all).

        graph_progress: (batch sizes captured, in all).
        """
        from moestro.engine.build import build_engine  # imports torch

        built = build_engine(config, progress, graph_progress)
        names = options.served_model_name or (config.model,)
        plan = built.plan
        cache_config = {
            "block_size": plan.page_size,
            "cache_dtype": plan.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "kv_cache_memory_bytes": plan.kv_cache_bytes,
            "num_gpu_blocks": plan.num_pages,
        }
        store_source = "disk" if config.kv_store.startswith("lmdb://") else "external_unspecified"
        metrics = ServerMetrics(names[0], plan.max_model_len, cache_config, store_source)
        if built.event_sink is not None:
            metrics.kv_tiers.watch_events(built.event_sink.counts)

        def on_report(report: StepReport) -> None:
            metrics.observe_step(report.stats)
            if report.expert_tokens is not None:
                metrics.observe_expert_tokens(report.expert_tokens.rows())
            for times in report.times:
                metrics.observe_phases(times)

        engine = AsyncEngine(built, on_report)
        model = ServedModel(
            names=names,
            root=config.model,
            max_model_len=engine.max_model_len,
            created=int(time.time()),
            chat_template=engine.chat_template,
            tokenizer=engine.tokenizer,
            default_params=engine.default_params,
            default_max_tokens=engine.default_max_tokens,
        )
        context = ServerContext(
            engine=engine,
            model=model,
            metrics=metrics,
            version=version,
            tells_timing=options.enable_per_request_metrics,
        )
        return cls(engine, context)

    def run(self, sock: socket.socket, shutdown_timeout_s: float) -> bool:
        """Serve on `sock` until SIGINT or SIGTERM. False when a second signal cut it short."""
        return asyncio.run(self._run(sock, shutdown_timeout_s))

    async def _run(self, sock: socket.socket, shutdown_timeout_s: float) -> bool:
        name = self.context.model.names[0]
        url = url_of(sock)
        drained = await run_app(
            create_app(self.context),
            sock,
            shutdown_timeout_s,
            on_started=lambda: logger.info("serving %s on %s (Ctrl-C stops)", name, url),
            abort=lambda: self.engine.close(drain=False),
        )
        if drained:
            await self.engine.close(drain=False)
            logger.info("stopped")
        return drained
