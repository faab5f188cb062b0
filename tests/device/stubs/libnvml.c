/* A libnvidia-ml.so.1 that answers for the machine of a facts file: the functions that pynvml looks up for
 * attnprobe. The signatures and structures are those of the public NVML API. */
#include "machine.h"

#include <stdio.h>
#include <string.h>

#define VISIBLE __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7
};
enum { MOST_HANDLES = 256 };

typedef int result;

/* A GPU, or one MIG instance of a GPU. */
typedef struct {
    const json *gpu, *instance;
} target;
typedef target *handle;

static target targets[MOST_HANDLES];
static int target_count;
static int initialized;

static result begin(const char *function, handle device) {
    if (!initialized) return UNINITIALIZED;
    if (!device) return INVALID_ARGUMENT;
    return failure(function, device->gpu);
}

static handle handle_of(const json *gpu, const json *instance) {
    for (int i = 0; i < target_count; i++)
        if (targets[i].gpu == gpu && targets[i].instance == instance) return &targets[i];
    if (target_count == MOST_HANDLES) return NULL;
    targets[target_count] = (target){gpu, instance};
    return &targets[target_count++];
}

static const json *nvml_of(handle device) { return json_member(device->gpu, "nvml"); }

static result copy(char *to, unsigned length, const char *text) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

VISIBLE result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    result code = failure("nvmlInitWithFlags", NULL);
    if (!code) initialized = 1;
    return code;
}

VISIBLE result nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized = 0;
    return SUCCESS;
}

VISIBLE const char *nvmlErrorString(result code) {
    static char text[32];
    snprintf(text, sizeof text, "NVML error %d", code);
    return text;
}

VISIBLE result nvmlSystemGetDriverVersion(char *version, unsigned length) {
    result code = failure("nvmlSystemGetDriverVersion", NULL);
    return code ? code : copy(version, length, json_text(machine(), "driver", ""));
}

VISIBLE result nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = (int)json_number(machine(), "cuda", 0);
    return failure("nvmlSystemGetCudaDriverVersion_v2", NULL);
}

VISIBLE result nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    const json *gpus = json_member(machine(), "gpus");
    for (const json *gpu = gpus ? gpus->first : NULL; gpu; gpu = gpu->next) {
        const json *list = json_member(json_member(gpu, "nvml"), "processes");
        for (const json *one = list ? list->first : NULL; one; one = one->next)
            if (json_number(one, "pid", -1) == pid) return copy(name, length, json_text(one, "name", ""));
    }
    return NOT_FOUND;
}

VISIBLE result nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized) return UNINITIALIZED;
    *count = (unsigned)json_length(json_member(machine(), "gpus"));
    return failure("nvmlDeviceGetCount_v2", NULL);
}

VISIBLE result nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *device) {
    const json *gpu = json_element(json_member(machine(), "gpus"), (int)index);
    if (!initialized) return UNINITIALIZED;
    if (!gpu) return INVALID_ARGUMENT;
    *device = handle_of(gpu, NULL);
    return failure("nvmlDeviceGetHandleByIndex_v2", gpu);
}

VISIBLE result nvmlDeviceGetName(handle device, char *name, unsigned length) {
    result code = begin("nvmlDeviceGetName", device);
    if (code) return code;
    return copy(name, length, json_text(device->instance ? device->instance : device->gpu, "name", ""));
}

VISIBLE result nvmlDeviceGetUUID(handle device, char *uuid, unsigned length) {
    result code = begin("nvmlDeviceGetUUID", device);
    if (code) return code;
    return copy(uuid, length, json_text(device->instance ? device->instance : device->gpu, "uuid", ""));
}

VISIBLE result nvmlDeviceGetCudaComputeCapability(handle device, int *major, int *minor) {
    result code = begin("nvmlDeviceGetCudaComputeCapability", device);
    if (!code) sscanf(json_text(device->gpu, "sm", "0.0"), "%d.%d", major, minor);
    return code;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, slot, id, subsystem;
    char bus_id[32];
} pci_info;

VISIBLE result nvmlDeviceGetPciInfo_v3(handle device, pci_info *pci) {
    result code = begin("nvmlDeviceGetPciInfo_v3", device);
    if (code) return code;
    const char *text = json_text(device->gpu, "pci", "00000000:00:00.0");
    memset(pci, 0, sizeof *pci);
    sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->slot);
    copy(pci->legacy, sizeof pci->legacy, text + 4);
    return copy(pci->bus_id, sizeof pci->bus_id, text);
}

typedef struct {
    unsigned long long total, free, used;
} memory_info;

VISIBLE result nvmlDeviceGetMemoryInfo(handle device, memory_info *memory) {
    result code = begin("nvmlDeviceGetMemoryInfo", device);
    if (code) return code;
    long long total = json_number(device->instance ? device->instance : device->gpu, "memory", 0);
    memory->total = memory->free = (unsigned long long)total;
    memory->used = 0;
    return SUCCESS;
}

VISIBLE result nvmlDeviceGetComputeMode(handle device, int *mode) {
    result code = begin("nvmlDeviceGetComputeMode", device);
    if (!code) *mode = (int)json_number(device->gpu, "compute_mode", 0);
    return code;
}

static result two_modes(const char *function, handle device, const char *name, unsigned *now,
                        unsigned *next) {
    result code = begin(function, device);
    if (code) return code;
    const json *mode = json_member(nvml_of(device), name);
    if (!mode) return NOT_SUPPORTED;
    *now = *next = (unsigned)mode->number;
    return SUCCESS;
}

VISIBLE result nvmlDeviceGetEccMode(handle device, unsigned *now, unsigned *next) {
    return two_modes("nvmlDeviceGetEccMode", device, "ecc", now, next);
}

VISIBLE result nvmlDeviceGetMigMode(handle device, unsigned *now, unsigned *next) {
    return two_modes("nvmlDeviceGetMigMode", device, "mig_mode", now, next);
}

VISIBLE result nvmlDeviceGetMaxMigDeviceCount(handle device, unsigned *count) {
    result code = begin("nvmlDeviceGetMaxMigDeviceCount", device);
    if (!code) *count = json_member(nvml_of(device), "mig_mode") ? 7 : 0;
    return code;
}

VISIBLE result nvmlDeviceGetMigDeviceHandleByIndex(handle device, unsigned index, handle *mig) {
    result code = begin("nvmlDeviceGetMigDeviceHandleByIndex", device);
    if (code) return code;
    const json *instance = json_element(json_member(device->gpu, "instances"), (int)index);
    if (!instance) return NOT_FOUND;
    *mig = handle_of(device->gpu, instance);
    return SUCCESS;
}

VISIBLE result nvmlDeviceGetGpuInstanceId(handle device, unsigned *id) {
    result code = begin("nvmlDeviceGetGpuInstanceId", device);
    if (!code) *id = (unsigned)json_number(device->instance, "gpu_instance", 0);
    return code;
}

VISIBLE result nvmlDeviceGetComputeInstanceId(handle device, unsigned *id) {
    result code = begin("nvmlDeviceGetComputeInstanceId", device);
    if (!code) *id = (unsigned)json_number(device->instance, "compute_instance", 0);
    return code;
}

typedef struct {
    unsigned multiprocessors, engines[7];
    unsigned long long memory_mib;
} attributes;

VISIBLE result nvmlDeviceGetAttributes_v2(handle device, attributes *found) {
    result code = begin("nvmlDeviceGetAttributes_v2", device);
    if (code) return code;
    if (!device->instance) return NOT_SUPPORTED;
    memset(found, 0, sizeof *found);
    found->multiprocessors = (unsigned)json_number(device->instance, "multiprocessors", 0);
    found->memory_mib = (unsigned long long)json_number(device->instance, "memory", 0) >> 20;
    return SUCCESS;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process;

/* NVML's way to return a list: first asked for the length with room for none. */
static result list(const json *from, unsigned *count, process *processes) {
    unsigned length = (unsigned)json_length(from);
    if (*count < length) {
        *count = length;
        return INSUFFICIENT_SIZE;
    }
    *count = length;
    for (unsigned i = 0; i < length; i++) {
        const json *one = json_element(from, (int)i);
        processes[i] = (process){(unsigned)json_number(one, "pid", 0),
                                 (unsigned long long)json_number(one, "memory", -1), ~0u, ~0u};
    }
    return SUCCESS;
}

VISIBLE result nvmlDeviceGetComputeRunningProcesses_v3(handle device, unsigned *count, process *processes) {
    result code = begin("nvmlDeviceGetComputeRunningProcesses_v3", device);
    if (code) return code;
    const json *holder = device->instance ? device->instance : nvml_of(device);
    return list(json_member(holder, "processes"), count, processes);
}

VISIBLE result nvmlDeviceGetMPSComputeRunningProcesses_v3(handle device, unsigned *count,
                                                          process *processes) {
    result code = begin("nvmlDeviceGetMPSComputeRunningProcesses_v3", device);
    return code ? code : list(json_member(nvml_of(device), "mps_processes"), count, processes);
}
