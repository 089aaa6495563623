/* A stand-in for libnvidia-ml.so.1: what the real package nvidia-ml-py calls, answered from the file $FAKE_NVML, which
   has lines "gpu0.busy 98". It is read in every call, so that tests can change it meanwhile. A figure without a line is
   not supported; "gpu0.NAME.error 15" makes a call fail; "gpu0.lost 15" makes all calls about a GPU fail;
   "gpu0.hang 1" keeps the call for its utilisation for ever. Structs as in nvml.h (R535). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMED_OUT = 10, INVALID = 2 };
typedef unsigned long long u64;
typedef struct { u64 index; } device; /* 0..99: GPUs; 100 * (gpu + 1) + n: instances */

static device devices[1000];
static u64 event_serial;

static int look(const char *key, char *value) {
  char line[1024], name[256];
  int found = 0;
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  if (!file) return 0;
  while (!found && fgets(line, sizeof line, file))
    if (sscanf(line, "%255s %767[^\n]", name, value) == 2 && !strcmp(name, key)) found = 1;
  fclose(file);
  return found;
}

static int number(const char *key, u64 *value) {
  char text[768];
  if (!look(key, text)) return 0;
  *value = strtoull(text, 0, 10);
  return 1;
}

static void keyed(char *key, const device *d, const char *name) {
  if (d->index < 100) sprintf(key, "gpu%llu.%s", d->index, name);
  else sprintf(key, "gpu%llu.mig%llu.%s", d->index / 100 - 1, d->index % 100, name);
}

static int figure(const device *d, const char *name, u64 *value) {
  char key[256], failing[300];
  u64 code;
  keyed(key, d, "lost");
  if (number(key, &code)) return (int)code;
  keyed(key, d, name);
  sprintf(failing, "%s.error", key);
  if (number(failing, &code)) return (int)code;
  return number(key, value) ? SUCCESS : NOT_SUPPORTED;
}

static int text(const device *d, const char *name, char *out, unsigned size) {
  char key[256], value[768];
  u64 code;
  keyed(key, d, "lost");
  if (number(key, &code)) return (int)code;
  keyed(key, d, name);
  if (!look(key, value)) return NOT_SUPPORTED;
  snprintf(out, size, "%s", value);
  return SUCCESS;
}

static int small(const device *d, const char *name, unsigned *out) {
  u64 value = 0;
  int code = figure(d, name, &value);
  *out = (unsigned)value;
  return code;
}

int nvmlInitWithFlags(unsigned flags) {
  u64 code = 0;
  char noise[768];
  if (look("noise", noise)) { printf("%s\n", noise); fflush(stdout); }
  number("init", &code);
  return (int)code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 18 ? "Driver/library version mismatch" : "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { u64 value = 0; number("count", &value); *count = (unsigned)value; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
  char key[64];
  u64 code;
  sprintf(key, "gpu%u.handle.error", index);
  if (number(key, &code)) return (int)code;
  devices[index].index = index;
  *out = &devices[index];
  return SUCCESS;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned size) { return text(d, "uuid", out, size); }
int nvmlDeviceGetName(device *d, char *out, unsigned size) { return text(d, "name", out, size); }
int nvmlDeviceGetMinorNumber(device *d, unsigned *out) { return small(d, "minor", out); }

int nvmlDeviceGetUtilizationRates(device *d, unsigned *out) {
  char key[64];
  u64 hang = 0;
  keyed(key, d, "hang");
  if (number(key, &hang) && hang) for (;;) pause();
  int code = small(d, "busy", &out[0]);
  return code ? code : small(d, "memory_busy", &out[1]);
}
int nvmlDeviceGetMemoryInfo(device *d, u64 *out) {
  int code = figure(d, "memory_total", &out[0]);
  if (!code) code = figure(d, "memory_used", &out[2]);
  out[1] = out[0] - out[2];
  return code;
}
int nvmlDeviceGetPowerUsage(device *d, unsigned *out) { return small(d, "power", out); }
int nvmlDeviceGetEnforcedPowerLimit(device *d, unsigned *out) { return small(d, "power_limit", out); }
int nvmlDeviceGetTotalEnergyConsumption(device *d, u64 *out) { return figure(d, "energy", out); }
int nvmlDeviceGetClockInfo(device *d, int type, unsigned *out) { return type == 1 ? small(d, "sm_clock", out) : NOT_SUPPORTED; }
int nvmlDeviceGetMaxClockInfo(device *d, int type, unsigned *out) { return type == 1 ? small(d, "sm_clock_max", out) : NOT_SUPPORTED; }
int nvmlDeviceGetTemperature(device *d, int sensor, unsigned *out) { return small(d, "temperature", out); }
#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(device *d, u64 *out) { return figure(d, "reasons", out); }
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(device *d, u64 *out) { return figure(d, "reasons", out); }
int nvmlDeviceGetTotalEccErrors(device *d, int type, int counter, u64 *out) {
  return type == 1 && counter == 0 ? figure(d, "uncorrected", out) : NOT_SUPPORTED;
}
int nvmlDeviceGetPcieThroughput(device *d, int counter, unsigned *out) { return small(d, counter ? "pcie_rx" : "pcie_tx", out); }
int nvmlDeviceGetPcieReplayCounter(device *d, unsigned *out) { return small(d, "pcie_replays", out); }

typedef struct { unsigned id, scope; long long at, took; int type, code; u64 value; } field;
int nvmlDeviceGetFieldValues(device *d, int count, field *fields) {
  for (int i = 0; i < count; i++) {
    char name[64];
    sprintf(name, "field%u", fields[i].id);
    fields[i].value = 0;
    fields[i].code = figure(d, name, &fields[i].value);
  }
  return SUCCESS;
}

typedef struct { unsigned pid; u64 memory; unsigned instance, compute; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *out) {
  char list[768] = "", *each, *rest;
  int code = text(d, "processes", list, sizeof list);
  unsigned found = 0;
  if (code) return code;
  for (each = strtok_r(list, " ", &rest); each; each = strtok_r(0, " ", &rest), found++)
    if (out && found < *count) {
      u64 memory = 0;
      sscanf(each, "%u:%llu", &out[found].pid, &memory);
      out[found].memory = memory;
    }
  code = found && (!out || found > *count) ? INSUFFICIENT_SIZE : SUCCESS;
  *count = found;
  return code;
}

typedef struct { unsigned pid; u64 at; unsigned sm, memory, encoder, decoder; } used;
int nvmlDeviceGetProcessUtilization(device *d, used *out, unsigned *count, u64 since) {
  char list[768] = "", *each, *rest;
  int code = text(d, "process_use", list, sizeof list);
  unsigned found = 0;
  if (code) return code;
  for (each = strtok_r(list, " ", &rest); each; each = strtok_r(0, " ", &rest)) {
    used one = {0};
    if (sscanf(each, "%u:%u:%u:%llu", &one.pid, &one.sm, &one.memory, &one.at) != 4 || one.at <= since) continue;
    if (out && found < *count) out[found] = one;
    found++;
  }
  if (!found) return NOT_FOUND;
  code = out ? SUCCESS : INSUFFICIENT_SIZE;
  *count = found;
  return code;
}

int nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending) { *pending = 0; return small(d, "mig", now); }
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *out) { return small(d, "mig_count", out); }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out) {
  char uuid[96];
  device *part = &devices[100 * (d->index + 1) + index];
  part->index = 100 * (d->index + 1) + index;
  *out = part;
  return text(part, "uuid", uuid, sizeof uuid) ? NOT_FOUND : SUCCESS;
}

typedef struct { device *device; u64 type, data; unsigned instance, compute; } event;
int nvmlEventSetCreate(void **out) { *out = &event_serial; return SUCCESS; }
int nvmlDeviceRegisterEvents(device *d, u64 types, void *set) { return types == 8 ? SUCCESS : INVALID; }
int nvmlEventSetWait_v2(void *set, event *out, unsigned wait_ms) { /* "event SERIAL GPU XID" */
  char line[768];
  u64 serial, gpu, xid;
  if (!look("event", line) || sscanf(line, "%llu %llu %llu", &serial, &gpu, &xid) != 3 || serial <= event_serial)
    return TIMED_OUT;
  event_serial = serial;
  memset(out, 0, sizeof *out);
  devices[gpu].index = gpu;
  out->device = &devices[gpu];
  out->type = 8;
  out->data = xid;
  return SUCCESS;
}
