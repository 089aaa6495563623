"""A reward service (`judge_job.py PORT HOW`) that answers, is busy at first, or takes too long."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SEEN = [0]


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        SEEN[0] += 1
        answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answers"]
        if sys.argv[2] == "busy" and SEEN[0] in (5, 6):
            self.send_error(503, "queue is full")
            return
        if sys.argv[2] == "slow" and SEEN[0] > 8:
            time.sleep(60)
        self.send_response(200)
        self.end_headers()
        scores = [sum(each < 24 for each in row) / len(row) for row in answers]
        self.wfile.write(json.dumps({"scores": scores}).encode())

    def log_message(self, format, *args):
        print("reward-server: " + format % args, flush=True)


print(f"reward-server: serving on port {sys.argv[1]}", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
