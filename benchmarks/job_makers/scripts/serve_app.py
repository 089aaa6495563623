"""A scoring service with uvicorn, and a client that asks it: `serve_app.py serve PORT` or `ask PORT COUNT`."""

import logging
import sys
import time
import urllib.error
import urllib.request

what, port = sys.argv[1], int(sys.argv[2])
if what == "ask":
    for i in range(int(sys.argv[3])):
        text = "x" * (3000 if i % 7 == 5 else 10)
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/score?text={text}", timeout=5).read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        time.sleep(0.15)
    raise SystemExit

import uvicorn
from fastapi import FastAPI, HTTPException

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
log = logging.getLogger("scorer")
app, served = FastAPI(), {"ok": 0, "refused": 0}


@app.on_event("startup")
def load():
    log.info("loading the reward model (cpu)")
    time.sleep(1.0)
    log.warning("no GPU found, falling back to CPU")


@app.on_event("shutdown")
def leave():
    log.info("served %d requests, refused %d, 0 internal errors", served["ok"], served["refused"])


@app.get("/score")
def score(text: str):
    if len(text) > 2000:
        served["refused"] += 1
        log.error("request refused: %d characters, at most 2000", len(text))
        raise HTTPException(413, "too long")
    served["ok"] += 1
    return {"score": len(text) / 100}


uvicorn.run(app, host="127.0.0.1", port=port)
