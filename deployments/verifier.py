"""The verifier deployment: holds the target, runs the step loop, keeps a drafter and the controller informed."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from typing import Any

from ray import serve

from deployments.curve import KeyPair
from deployments.draft_link import DrafterAddress, ZmqDraftLink
from deployments.reporting import report_of
from deployments.settings import AppSettings
from deployments.step_thread import StepThread, describe
from deployments.token_link import GatewayAddress, TokenOutbox
from engine.engine import DraftSide, Engine
from engine.loading import block_size, load_target_side, profile_key
from engine.profile import profile_draft, profile_verify
from engine.request import GenerationRequest, RequestError, SamplingParams
from scheduler.policy import VerifyPolicy, safe_default
from scheduler.tiers import UnknownTierError

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.25
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5
DRAFTER_WAIT_S = 120.0


class Verifier:
    """A thin shell around the engine's step thread.

    Args:
        settings: of the application.
        drafter: handle of the drafter deployment.
        controller: handle of the controller deployment.
    """

    async def __init__(self, settings: AppSettings, drafter: Any, controller: Any) -> None:
        self._settings = settings
        self._drafter = drafter
        self._controller = controller
        side = load_target_side(settings.engine, settings.drafting, settings.cache_root)
        gamma = block_size(settings.drafting)
        self._keys = KeyPair.generate()
        self._identity = f"verifier-{uuid.uuid4().hex[:12]}"
        self._link = ZmqDraftLink(self._keys, self._identity)
        self._temperatures = side.temperatures
        self._key = profile_key(settings.engine, settings.drafting, side.weights)
        self._default = safe_default(settings.tiers, gamma, temperatures=side.temperatures)
        self._draft = DraftSide(side.fusion, side.weights, gamma, side.drafter.sliding_window, self._link)
        engine = Engine(side.target, side.tokenizer, settings.engine, settings.tiers, self._default, self._draft)
        self._target = side.target
        self._steps = StepThread(engine, TokenOutbox(self._keys))
        self._opened: str | None = None
        loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._tasks = [loop.create_task(self._keep_drafter()), loop.create_task(self._keep_policy())]

    def record_replica_metadata(self) -> dict[str, Any]:
        """What gateways need to let this replica's tokens in."""
        return {"public_key": self._keys.public}

    async def generate(self, request: dict[str, Any], gateway: dict[str, str]) -> dict[str, Any]:
        """Open a session and stay until it ends; tokens travel over the gateway's token link meanwhile.

        Cancelling this call ends the session before the next step.

        Returns:
            {"finish_reason": ...}, or {"error": ..., "param": ...} for a request that cannot be served.
        """
        await self._ready.wait()
        params = SamplingParams(**{**request.pop("params"), "stop": tuple(request["stop"])})
        del request["stop"]
        wanted = GenerationRequest(params=params, **{**request, "prompt": tuple(request["prompt"])})
        begun = self._steps.begin(wanted, GatewayAddress(**gateway))
        try:
            done = await asyncio.wrap_future(begun)
            chunk = await asyncio.wrap_future(done)
            return {"finish_reason": chunk.finish_reason}
        except (RequestError, UnknownTierError) as error:
            return describe(error)
        finally:
            self._steps.abort(wanted.request_id)

    async def state(self) -> dict[str, Any]:
        """What the engine holds, for metrics and tests."""
        return await asyncio.wrap_future(self._steps.call(self._state))

    def _state(self, engine: Engine) -> dict[str, Any]:
        address = self._link.address
        return {
            "identity": self._identity,
            "ready": self._ready.is_set(),
            "load": engine.load(),
            "free_pages": engine.pool.free,
            "pages": engine.pool.pages,
            "policy_version": engine.policy.version,
            "drafter": None if address is None else address.replica,
            "compiled_kernels": self._target.compiled,
            "unprofiled": engine.policy.costs is None,
            **engine.log.totals(),
        }

    async def check_health(self) -> None:
        """Raises when the step loop has ended."""
        if self._steps.error is not None:
            raise RuntimeError(f"the step loop has ended: {self._steps.error!r}")

    # ---------------------------------------------------------------- drafter

    async def _keep_drafter(self) -> None:
        """Whenever no drafter is connected, find one through Serve."""
        if self._settings.engine.verify_length == 0:
            return
        while True:
            # Asked in the step loop's thread, which owns the socket: notices a drafter that died while nobody drafted.
            await asyncio.wrap_future(self._steps.call(lambda _: self._link.ready))
            if self._link.lost:
                try:
                    await asyncio.wait_for(self._find_drafter(), CALL_TIMEOUT_S)
                except Exception as error:  # whatever is wrong over there, requests decode plainly meanwhile
                    logger.info("no drafter yet: %r", error)
            await asyncio.sleep(RETRY_S)

    async def _find_drafter(self) -> None:
        async with self._drafter.open_link.choose_replica(self._keys.public) as replica:
            meta = replica.replica_metadata
            address = DrafterAddress(
                str(replica.replica_id), meta["endpoint"], meta["public_key"], meta["weights"], meta["block_size"]
            )
            if address.weights != self._draft.weights:
                raise RuntimeError(f"drafter weights {address.weights}, this verifier's are {self._draft.weights}")
            if address.block_size != self._draft.block_size:
                raise RuntimeError(f"drafter blocks of {address.block_size}, expected {self._draft.block_size}")
            if await self._drafter.open_link.dispatch(replica, self._keys.public) != address.public_key:
                raise RuntimeError("another replica answered")
        self._link.connect(address)
        logger.info("drafting by %s", address.replica)

    # ---------------------------------------------------------------- controller

    async def _keep_policy(self) -> None:
        """Register, measure costs if they are not known, then report and take the policy a few times a second."""
        try:
            await self._register()
        finally:
            self._ready.set()
        replica = serve.get_replica_context().replica_id.unique_id
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            try:
                report = await asyncio.wrap_future(self._steps.call(lambda e: report_of(e, replica)))
                answer = await asyncio.wait_for(
                    self._controller.report.remote(report.model_dump(mode="json")), CALL_TIMEOUT_S
                )
                if answer:
                    await self._apply(answer)
                else:  # a new controller
                    await self._register()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.info("the controller does not answer: %r", error)
                await asyncio.wrap_future(self._steps.call(self._expire))

    async def _register(self) -> None:
        gamma = self._draft.block_size
        try:
            answer = await asyncio.wait_for(
                self._controller.register.remote(self._key, gamma, list(self._temperatures)), DRAFTER_WAIT_S
            )
            if answer["profile"]:
                logger.info("measuring what steps cost")
                if self._settings.engine.verify_length != 0:
                    await self._drafter_there()
                verify, draft = await asyncio.wrap_future(self._steps.call(self._measure))
                answer["policy"] = await asyncio.wait_for(
                    self._controller.submit_profile.remote(self._key, verify, draft), CALL_TIMEOUT_S
                )
            await self._apply(answer["policy"])
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.warning("no policy from the controller, the safe default holds: %r", error)

    async def _drafter_there(self) -> None:
        for _ in range(int(DRAFTER_WAIT_S / RETRY_S)):
            if not self._link.lost:
                return
            await asyncio.sleep(RETRY_S)
        raise TimeoutError("no drafter to measure")

    def _measure(self, engine: Engine) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        verify = profile_verify(self._target, engine.pool, logger.info)
        draft: dict[int, list[float]] = {}
        if self._link.ready:
            draft = profile_draft(self._draft, self._target.hidden_size, logger.info)
        return verify, draft

    async def _apply(self, policy: dict[str, Any]) -> None:
        parsed = VerifyPolicy.model_validate(policy)

        def apply(engine: Engine) -> None:
            engine.policy = parsed

        await asyncio.wrap_future(self._steps.call(apply))

    def _expire(self, engine: Engine) -> None:
        """Fall back to the safe default (with the costs last known) once the policy is too old."""
        if engine.policy.expired(time.time()):
            engine.policy = self._default.model_copy(update={"costs": engine.policy.costs})

    def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        steps = getattr(self, "_steps", None)
        if steps is not None:
            steps.stop()
            self._link.close()


def request_message(request: GenerationRequest) -> dict[str, Any]:
    """A request as plain data for `Verifier.generate`."""
    params = dataclasses.asdict(request.params)
    stop = list(params.pop("stop"))
    return {
        "request_id": request.request_id,
        "prompt": list(request.prompt),
        "params": params,
        "stop": stop,
        "tier": request.tier,
        "speculation": request.speculation,
    }
