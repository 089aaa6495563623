"""A scoring service that is overloaded for some requests, or hangs, or always answers."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, GOOD_AFTER, FAIL_FROM, MODE = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
COUNT = [0]


class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        COUNT[0] += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        failing = FAIL_FROM <= COUNT[0] < GOOD_AFTER
        if failing and MODE == "hang":
            time.sleep(60)
        body = json.dumps({"error": "overloaded"} if failing else {"scores": [0.5] * 8}).encode()
        self.send_response(503 if failing else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Service).serve_forever()
