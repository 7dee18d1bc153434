/* A libnvidia-ml.so.1 of five GPUs. FAKE_GPUS: how many of them there are (2); FAKE_FAIL: the function that fails;
   FAKE_LOST: the GPU that this process may not use; FAKE_DRIVER, FAKE_CUDA: the versions of the driver. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct gpu {
  const char *name, *uuid;
  int major, minor;
  unsigned cores, bits, clock;
} GPUS[] = {
    {"NVIDIA H200", "GPU-aa11-22", 9, 0, 16896, 6144, 3201},
    {"NVIDIA Unheard Of", "GPU-aa33-44", 8, 6, 5888, 256, 7001},
    {"Tesla V100-SXM2-16GB", "GPU-bb55-66", 7, 0, 5120, 4096, 877},
    {"Quadro RTX 6000", "GPU-dd99-00", 7, 5, 4608, 384, 7001},
    {"NVIDIA GB10", "GPU-cc77-88", 12, 1, 6144, 0, 0},
};

static int started;

int fake_started(void) { return started; }

static int fails(const char *function) {
  const char *name = getenv("FAKE_FAIL");
  return name && !strcmp(name, function) ? 3 : started ? 0 : 1;
}

const char *nvmlErrorString(int code) { return code == 1 ? "Uninitialized" : "Not Supported"; }

int nvmlInit_v2(void) {
  started++;
  int code = fails("nvmlInit_v2");
  if (code) started--;
  return code;
}

int nvmlShutdown(void) {
  started--;
  return 0;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  const char *version = getenv("FAKE_DRIVER");
  snprintf(text, size, "%s", version ? version : "580.65.06");
  return fails("nvmlSystemGetDriverVersion");
}

int nvmlSystemGetCudaDriverVersion_v2(unsigned *version) {
  const char *cuda = getenv("FAKE_CUDA");
  *version = cuda ? atoi(cuda) : 13000;
  return fails("nvmlSystemGetCudaDriverVersion_v2");
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  const char *gpus = getenv("FAKE_GPUS");
  *count = gpus ? atoi(gpus) : 2;
  return fails("nvmlDeviceGetCount_v2");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, const struct gpu **gpu) {
  const char *lost = getenv("FAKE_LOST");
  if (lost && atoi(lost) == (int)index) return 4;
  *gpu = &GPUS[index];
  return fails("nvmlDeviceGetHandleByIndex_v2");
}

int nvmlDeviceGetCudaComputeCapability(const struct gpu *gpu, int *major, int *minor) {
  *major = gpu->major, *minor = gpu->minor;
  return fails("nvmlDeviceGetCudaComputeCapability");
}

int nvmlDeviceGetName(const struct gpu *gpu, char *text, unsigned size) {
  snprintf(text, size, "%s", gpu->name);
  return fails("nvmlDeviceGetName");
}

int nvmlDeviceGetUUID(const struct gpu *gpu, char *text, unsigned size) {
  snprintf(text, size, "%s", gpu->uuid);
  return fails("nvmlDeviceGetUUID");
}

int nvmlDeviceGetMemoryBusWidth(const struct gpu *gpu, unsigned *bits) {
  *bits = gpu->bits;
  return fails("nvmlDeviceGetMemoryBusWidth");
}

int nvmlDeviceGetMaxClockInfo(const struct gpu *gpu, int kind, unsigned *megahertz) {
  *megahertz = kind == 2 ? gpu->clock : 1;
  return fails("nvmlDeviceGetMaxClockInfo");
}

#ifndef OLD /* drivers before 470 */
int nvmlDeviceGetNumGpuCores(const struct gpu *gpu, unsigned *cores) {
  *cores = gpu->cores;
  return fails("nvmlDeviceGetNumGpuCores");
}
#endif
