{{/* Refuses a duplicate name: the API server would, too (server-side apply, which is how Helm 4 installs), in the
middle of an upgrade, and clients that apply let one of the two win.
(dict "what" "router.env" "names" $names "taken" (list "POD_NAME")); `taken`: what the chart itself sets there */}}
{{- define "lorafleet.once" -}}
{{- $what := .what -}}
{{- $taken := .taken -}}
{{- $seen := dict -}}
{{- range .names -}}
{{- if has . $taken -}}{{- fail (printf "%s: %s is set by the chart itself; leave it out" $what .) -}}{{- end -}}
{{- if hasKey $seen . -}}{{- fail (printf "%s: %s is a duplicate; leave one out" $what .) -}}{{- end -}}
{{- $_ := set $seen . true -}}
{{- end -}}
{{- end }}

{{/* One field of each item, as a JSON list. (dict "items" .env "field" "name") */}}
{{- define "lorafleet.each" -}}
{{- $field := .field -}}
{{- $found := list -}}
{{- range .items -}}{{- $found = append $found (get . $field) -}}{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* (dict "what" "router" "given" .Values.router): checks that router, orchestrator and pools share. */}}
{{- define "lorafleet.checkPod" -}}
{{- $env := include "lorafleet.each" (dict "items" .given.env "field" "name") | fromJsonArray -}}
{{- include "lorafleet.once" (dict "what" (printf "%s.env" .what) "names" $env "taken" (list "POD_NAME" "POD_IP")) -}}
{{- $spread := list -}}
{{- range .given.topologySpreadConstraints -}}{{- $spread = append $spread (printf "%s with %s" .topologyKey .whenUnsatisfiable) -}}{{- end -}}
{{- include "lorafleet.once" (dict "what" (printf "%s.topologySpreadConstraints" .what) "names" $spread "taken" list) -}}
{{- end }}

{{/* Refuses what no overlay may change: which object it is, the pods that belong to it, and their number.
(dict "what" "router" "overlays" .Values.router.overlays) */}}
{{- define "lorafleet.checkOverlays" -}}
{{- $what := .what -}}
{{- range $name, $overlay := .overlays -}}
{{- $where := printf "%s.overlays.%s" $what $name -}}
{{- range list "apiVersion" "kind" -}}
{{- if hasKey $overlay . -}}{{- fail (printf "%s.%s: an overlay changes the chart's object and makes no other; leave it out, or give a whole object in extraObjects" $where .) -}}{{- end -}}
{{- end -}}
{{- $spec := $overlay.spec | default dict -}}
{{- if hasKey $spec "selector" -}}{{- fail (printf "%s.spec.selector: the chart's labels select the pods; leave it out. Further labels of pods: overlays.pod.metadata.labels" $where) -}}{{- end -}}
{{- if eq $name "workload" -}}
{{- $better := dict "replicas" (printf "set %s.replicas, which leaves an autoscaler's number alone" $what) "template" (printf "write it as %s.overlays.pod, with metadata and spec of the pod" $what) "serviceName" "leave it out: it is the pool's own Service" -}}
{{- range $field, $advice := $better -}}
{{- if hasKey $spec $field -}}{{- fail (printf "%s.spec.%s: %s" $where $field $advice) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "pool" $pool "name" "fleet-lorafleet-l40s"): names in a worker's pod, and existing volumes. */}}
{{- define "lorafleet.checkWorker" -}}
{{- $pool := .pool -}}
{{- $what := printf "pools.%s" $pool.name -}}
{{- $env := include "lorafleet.each" (dict "items" $pool.env "field" "name") | fromJsonArray -}}
{{- if and $pool.hfToken.secretName (has "HF_TOKEN" $env) -}}
{{- fail (printf "pool %s: hfToken and HF_TOKEN in env set one variable; leave one out" $pool.name) -}}
{{- end -}}
{{- include "lorafleet.checkPod" (dict "what" $what "given" $pool) -}}
{{- $volumes := list "data" "tmp" "shm" "keys" "token" "tls" -}}
{{- $paths := list "/var/lib/lorafleet" "/tmp" "/dev/shm" "/etc/lorafleet/keys" "/etc/lorafleet/token" "/etc/lorafleet/tls" -}}
{{- if or $pool.demoModel $pool.modelVolume -}}{{- $volumes = append $volumes "models" -}}{{- $paths = append $paths "/models" -}}{{- end -}}
{{- if $pool.adapterVolume -}}{{- $volumes = append $volumes "adapters" -}}{{- $paths = append $paths "/adapters" -}}{{- end -}}
{{- range $pool.sourceSecrets -}}
{{- $volumes = append $volumes (printf "source-%s" .) -}}
{{- $paths = append $paths (printf "/etc/lorafleet/secrets/%s" .) -}}
{{- end -}}
{{- $named := include "lorafleet.each" (dict "items" $pool.volumes "field" "name") | fromJsonArray -}}
{{- include "lorafleet.once" (dict "what" (printf "%s.volumes" $what) "names" $named "taken" $volumes) -}}
{{- $mounted := include "lorafleet.each" (dict "items" $pool.volumeMounts "field" "mountPath") | fromJsonArray -}}
{{- include "lorafleet.once" (dict "what" (printf "%s.volumeMounts" $what) "names" $mounted "taken" $paths) -}}
{{- $other := ternary "Deployment" "StatefulSet" (eq $pool.kind "StatefulSet") -}}
{{- if lookup "apps/v1" $other .root.Release.Namespace .name -}}
{{- fail (printf "pool %s: kind is %s now, and its workers are a %s's: all of them would end at once. Add a pool with another name, wait until that is ready, then remove this one" $pool.name $pool.kind $other) -}}
{{- end -}}
{{- if eq $pool.kind "StatefulSet" -}}{{- include "lorafleet.checkClaims" . -}}{{- end -}}
{{- end }}

{{/* A StatefulSet's volume claims cannot change: the API server's own error names no value. */}}
{{- define "lorafleet.checkClaims" -}}
{{- $live := lookup "apps/v1" "StatefulSet" .root.Release.Namespace .name -}}
{{- if $live -}}
{{- $cache := .pool.cache -}}
{{- $was := dict -}}
{{- range dig "spec" "volumeClaimTemplates" list $live -}}{{- if eq .metadata.name "data" -}}{{- $was = .spec -}}{{- end -}}{{- end -}}
{{- $size := dig "resources" "requests" "storage" "0" $was -}}
{{- $class := $was.storageClassName | default "" -}}
{{- $changed := "" -}}
{{- if ne (empty $was) (not $cache.persistent.enabled) -}}
{{- $changed = printf "cache.persistent.enabled is %t now, and its workers %s" $cache.persistent.enabled (ternary "have no volumes of their own" "have volumes of their own" (empty $was)) -}}
{{- else if not $was -}}
{{- else if ne (include "lorafleet.bytes" $cache.size) (include "lorafleet.bytes" $size) -}}
{{- $changed = printf "cache.size is %v now, and its workers' volumes were made with %s" $cache.size $size -}}
{{- else if ne $cache.persistent.storageClassName $class -}}
{{- $changed = printf "cache.persistent.storageClassName is %q now, and its workers' volumes were made with %q" $cache.persistent.storageClassName $class -}}
{{- end -}}
{{- if $changed -}}
{{- /* The StatefulSet that is made anew has the number of values, or one: the present number is known only now. */ -}}
{{- $count := "" -}}
{{- if .pool.autoscaling.enabled -}}
{{- $count = printf " with replicas: %d, autoscaling.enabled: false in values once, or workers end" (int $live.spec.replicas) -}}
{{- else if ne (int $live.spec.replicas) (int .pool.replicas) -}}
{{- $count = printf " with replicas: %d in values once, or their number changes" (int $live.spec.replicas) -}}
{{- end -}}
{{- fail (printf "pool %s: %s. Kubernetes does not change the volumes of an existing StatefulSet: put the value back; or enlarge the volumes by hand, run kubectl -n %s delete statefulset %s --cascade=orphan, which keeps its pods, and upgrade again%s (docs/kubernetes.md, Larger volumes)" .pool.name $changed .root.Release.Namespace .name $count) -}}
{{- end -}}
{{- end -}}
{{- end }}
