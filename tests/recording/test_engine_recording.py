"""An engine that records itself, without any viewer, and is not troubled by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport.processes import Emitter, start_emitter
from tracer.engine_recording import EngineRecording, from_environment, path_of
from tracer.events import Gap, Header, Heartbeat, HookFault, Output, Prompt, Received, Sent
from tracer.clock import ClockAnchor
from tracer.replay import load
from tracer.trace_file import TraceFile
