"""The judge: `judge_server.py PORT MODE`; MODE is well, flaky, hang, broken, same, slow or late:SECONDS."""

import json
import random
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, mode = int(sys.argv[1]), sys.argv[2]
draw, asked = random.Random(3), 0


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        global asked
        asked += 1
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        if (mode == "hang" and asked > 6) or (mode == "flaky" and asked % 5 == 3):
            time.sleep(60 if mode == "hang" else 5)
        if (mode == "flaky" and asked % 7 == 6) or (mode == "broken" and asked > 6):
            self.send_error(503 if mode == "flaky" else 500)
            return
        same = mode == "same" and asked > 6
        scores = [0.5 if same else round(draw.random(), 3) for _ in samples]
        text = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


signal.signal(signal.SIGINT, signal.default_int_handler)
if mode.startswith("late:"):
    time.sleep(float(mode.split(":")[1]))
server = ThreadingHTTPServer(("127.0.0.1", port), Judge)
print(f"judge listens on 127.0.0.1:{port}", flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    print(f"shutting down after {asked} requests, 0 errors", flush=True)
