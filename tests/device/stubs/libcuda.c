/* A libcuda.so.1 that answers for the machine of a facts file. Nothing can be launched on it.
 *
 * cuda.bindings looks up one symbol, cuGetProcAddress_v2, and asks it for the rest by unversioned names.
 * The signatures are those of the public driver API. */
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VISIBLE __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_FOUND = 500
};
enum { MOST_DEVICES = 64 };

typedef int result;
typedef int device;

/* What CUDA calls a device: a GPU, or one MIG instance of a GPU. */
typedef struct {
    const json *gpu, *instance;
} shown;

static shown devices[MOST_DEVICES];
static int device_count;
static int initialized;

static const char *uuid_of(const shown *one) {
    return json_text(one->instance ? one->instance : one->gpu, "uuid", "");
}

static int has_mig_on(const json *gpu) {
    return (int)json_number(json_member(gpu, "nvml"), "mig_mode", 0) == 1;
}

/* All GPUs in CUDA's order: by PCI id if CUDA_DEVICE_ORDER says so, else as `cuda_order` lists them. */
static int order_gpus(const json *ordered[]) {
    const json *gpus = json_member(machine(), "gpus"), *order = json_member(machine(), "cuda_order");
    const char *wanted = getenv("CUDA_DEVICE_ORDER");
    int by_pci = wanted && !strcmp(wanted, "PCI_BUS_ID"), count = json_length(gpus);
    for (int i = 0; i < count; i++) {
        const json *place = by_pci ? NULL : json_element(order, i);
        ordered[i] = json_element(gpus, place ? (int)place->number : i);
    }
    return count;
}

static void show(const json *gpu, const json *instance) {
    if (device_count < MOST_DEVICES) devices[device_count++] = (shown){gpu, instance};
}

/* The only device of `all` whose UUID begins with a token, or NULL. */
static const shown *named(const shown all[], int count, const char *token) {
    const shown *found = NULL;
    for (int i = 0; i < count; i++)
        if (!strncmp(uuid_of(&all[i]), token, strlen(token))) {
            if (found) return NULL;
            found = &all[i];
        }
    return found;
}

/* CUDA_VISIBLE_DEVICES as the programming guide has it: what stands before the first invalid entry. */
static void apply_visible(const char *value, const json *ordered[], int count) {
    shown all[MOST_DEVICES];
    int known = 0, mig_taken = 0;
    for (int i = 0; i < count && known < MOST_DEVICES; i++) {
        const json *instances = json_member(ordered[i], "instances");
        all[known++] = (shown){ordered[i], NULL};
        for (int k = 0; has_mig_on(ordered[i]) && k < json_length(instances) && known < MOST_DEVICES; k++)
            all[known++] = (shown){ordered[i], json_element(instances, k)};
    }
    char *copy = strdup(value), *rest = copy, *token;
    while ((token = strsep(&rest, ",")) && *token) {
        char *end;
        long index = strtol(token, &end, 10);
        if (!*end) {
            if (index < 0 || index >= count) break;
            if (has_mig_on(ordered[index])) break;
            show(ordered[index], NULL);
            continue;
        }
        const shown *one = named(all, known, token);
        if (!one || (!one->instance && has_mig_on(one->gpu))) break;
        if (one->instance && mig_taken++) continue; /* a process gets one MIG instance, the first */
        show(one->gpu, one->instance);
    }
    free(copy);
}

static void enumerate(void) {
    const json *ordered[MOST_DEVICES];
    int count = order_gpus(ordered);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    device_count = 0;
    if (visible) {
        apply_visible(visible, ordered, count);
        return;
    }
    for (int i = 0; i < count; i++)
        if (!has_mig_on(ordered[i])) show(ordered[i], NULL);
    for (int i = 0; i < count && !device_count; i++)
        if (has_mig_on(ordered[i]) && json_length(json_member(ordered[i], "instances")))
            show(ordered[i], json_element(json_member(ordered[i], "instances"), 0));
}

static result begin(const char *function, device index, const shown **one) {
    if (!initialized) return NOT_INITIALIZED;
    if (index < 0 || index >= device_count) return INVALID_DEVICE;
    *one = &devices[index];
    return failure(function, devices[index].gpu);
}

VISIBLE result cuInit(unsigned flags) {
    int code = flags ? INVALID_VALUE : failure("cuInit", NULL);
    if (code) return code;
    enumerate();
    if (!device_count) return NO_DEVICE;
    initialized = 1;
    return SUCCESS;
}

VISIBLE result cuDriverGetVersion(int *version) {
    *version = (int)json_number(machine(), "cuda", 0);
    return failure("cuDriverGetVersion", NULL);
}

VISIBLE result cuDeviceGetCount(int *count) {
    if (!initialized) return NOT_INITIALIZED;
    *count = device_count;
    return failure("cuDeviceGetCount", NULL);
}

VISIBLE result cuDeviceGet(device *handle, int ordinal) {
    const shown *one;
    result code = begin("cuDeviceGet", ordinal, &one);
    if (!code) *handle = ordinal;
    return code;
}

VISIBLE result cuDeviceGetName(char *name, int length, device index) {
    const shown *one;
    result code = begin("cuDeviceGetName", index, &one);
    if (code) return code;
    snprintf(name, (size_t)length, "%s", json_text(one->instance ? one->instance : one->gpu, "name", ""));
    return SUCCESS;
}

VISIBLE result cuDeviceGetUuid_v2(unsigned char *bytes, device index) {
    const shown *one;
    result code = begin("cuDeviceGetUuid", index, &one);
    if (!code) uuid_bytes(uuid_of(one), bytes);
    return code;
}

VISIBLE result cuDeviceTotalMem_v2(size_t *bytes, device index) {
    const shown *one;
    result code = begin("cuDeviceTotalMem", index, &one);
    if (!code) *bytes = (size_t)json_number(one->instance ? one->instance : one->gpu, "memory", 0);
    return code;
}

VISIBLE result cuDeviceGetPCIBusId(char *text, int length, device index) {
    const shown *one;
    result code = begin("cuDeviceGetPCIBusId", index, &one);
    /* A facts file has NVML's spelling with eight digits of domain; CUDA writes four, in lower case. */
    if (!code) snprintf(text, (size_t)length, "%s", json_text(one->gpu, "pci", "") + 4);
    for (; !code && *text; text++)
        if (*text >= 'A' && *text <= 'F') *text += 'a' - 'A';
    return code;
}

/* The numbers of CUdevice_attribute, and under which name a facts file has each. */
static const struct {
    int number;
    const char *name;
} attributes[] = {
    {8, "smem_per_block"},        {12, "registers_per_block"},
    {16, "multiprocessors"},      {18, "integrated"},
    {20, "compute_mode"},         {38, "l2"},
    {81, "smem_per_sm"},          {82, "registers_per_sm"},
    {97, "smem_per_block_optin"}, {111, "smem_reserved_per_block"},
};

VISIBLE result cuDeviceGetAttribute(int *value, int attribute, device index) {
    const shown *one;
    result code = begin("cuDeviceGetAttribute", index, &one);
    if (code) return code;
    int major = 0, minor = 0;
    sscanf(json_text(one->gpu, "sm", ""), "%d.%d", &major, &minor);
    if (attribute == 75 || attribute == 76) {
        *value = attribute == 75 ? major : minor;
        return SUCCESS;
    }
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i].number == attribute) {
            const json *found = json_member(one->instance, attributes[i].name);
            if (!found) found = json_member(one->gpu, attributes[i].name);
            if (!found) return INVALID_VALUE; /* the facts do not say: unknown, not 0 */
            *value = (int)found->number;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

VISIBLE result cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                                   int *status) {
    static const struct {
        const char *name;
        void *function;
    } known[] = {
        {"cuInit", cuInit},
        {"cuDriverGetVersion", cuDriverGetVersion},
        {"cuDeviceGetCount", cuDeviceGetCount},
        {"cuDeviceGet", cuDeviceGet},
        {"cuDeviceGetName", cuDeviceGetName},
        {"cuDeviceGetUuid", cuDeviceGetUuid_v2},
        {"cuDeviceTotalMem", cuDeviceTotalMem_v2},
        {"cuDeviceGetPCIBusId", cuDeviceGetPCIBusId},
        {"cuDeviceGetAttribute", cuDeviceGetAttribute},
        {"cuGetProcAddress", cuGetProcAddress_v2},
    };
    (void)version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) *function = known[i].function;
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
